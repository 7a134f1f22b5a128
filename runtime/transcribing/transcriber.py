"""Writes down sound of any length, window by window, by the rule that Whisper was made with.

A window begins where the last piece of text before it ended. How long its text is and how it is drafted changes nothing
of what is heard: the decoder's texts are the target's.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...engines import Bundle, RequestError, Sound
from ..acceptance.sampling_params import SamplingParams
from ..requests.output import Output
from ..sources.log_mel import HOP, SAMPLE_RATE, log_mel, one_window, samples_of
from ..sources.source import Source
from ..state.asked import DraftLength
from .context import Context, read_prompt
from .fallback import NONE, Fallback
from .hearing import Hearing, Window
from .tokens import TASKS, WhisperTokens
from .transcript import Cut, Segment, Transcript, cuts

PLAIN = SamplingParams()


class Decodes(Protocol):
    """The part of a decoder that is asked."""

    @property
    def bundle(self) -> Bundle: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(
        self, prompts: Any, params: Any, *, sources: Any, draft_length: Any, drafter: Any
    ) -> Sequence[Output]: ...


Work = Generator[Window, Output, Transcript]


class Transcriber:
    """Asks a decoder for one window after another; several may share it."""

    def __init__(self, decoder: Decodes) -> None:
        self.decoder = decoder
        self.tokens = WhisperTokens.read(decoder.bundle.tokenizer, decoder.tokenizer)
        self._sounds = [one.contract.sound for one in decoder.bundle.encoders.values() if one.contract.sound]

    def transcribe(
        self,
        samples: Any,
        *,
        language: str | None = None,
        task: str = TASKS[0],
        timed: bool = True,
        params: SamplingParams = PLAIN,
        fallback: Fallback = NONE,
        prompt: str | Sequence[int] = (),
        goes_on: bool = False,
        draft_length: DraftLength | None = None,
        drafter: str | None = None,
        on_segment: Callable[[Segment], None] = lambda segment: None,
    ) -> Transcript:
        """Write down sound, 16,000 samples a second; of a language that is not named the model says what it hears.

        A window whose text is not good enough for the `fallback` is heard again, at its temperatures one after another.
        A `prompt` is what was said before, or words to expect: the end of a text, or token ids that have room. If the
        text `goes_on`, what has been heard is the context of each window after it.
        """
        work = self.work(
            samples,
            language=language,
            task=task,
            timed=timed,
            params=params,
            fallback=fallback,
            prompt=prompt,
            goes_on=goes_on,
            on_segment=on_segment,
        )
        asked = next(work)
        while True:
            [output] = self.decoder.generate(
                [asked.prompt], asked.params, sources=[asked.source], draft_length=draft_length, drafter=drafter
            )
            try:
                asked = work.send(output)
            except StopIteration as ended:
                transcript: Transcript = ended.value
                return transcript

    def work(
        self,
        samples: Any,
        *,
        language: str | None = None,
        task: str = TASKS[0],
        timed: bool = True,
        params: SamplingParams = PLAIN,
        fallback: Fallback = NONE,
        prompt: str | Sequence[int] = (),
        goes_on: bool = False,
        on_segment: Callable[[Segment], None] = lambda segment: None,
    ) -> Work:
        """Yield what to ask for, and be sent what came out, until all is heard.

        A window's text may have as many tokens as there is room for. Of sound that is longer than a window times are
        asked for in any case.
        """
        self.tokens.check(language, task)
        context = self._context(prompt, goes_on)
        heard = _read(samples)
        (pictures, frames), seconds = self._pictures(heard), len(heard) / SAMPLE_RATE
        del samples, heard  # which may be hours
        window = self._sounds[0].frames
        timed = timed or frames > window
        language = language or (yield from self._language(self._source(pictures, 0))) if self.tokens.languages else None
        beginning = self.tokens.beginning(language, task, timed=timed)
        asked = replace(params, extra={**params.extra, "speech": self.tokens.rules(timed=timed)})
        hearing = Hearing(self.decoder.bundle, self.tokens, asked, fallback)
        entries = self.decoder.bundle.longest_source("target")
        seek, segments = 0, list[Segment]()
        while seek < frames:
            source, length = self._source(pictures, seek), min(window, frames - seek)
            tokens = yield from hearing.hear(source, context.before(), beginning)
            found, end = list[Cut](), None
            if tokens is not None and timed:
                found, end = cuts(tokens, self.tokens.first_time, length * entries / window)
            elif tokens is not None:
                found = [Cut(0, min(length, seconds * SAMPLE_RATE / HOP) * entries / window, tuple(tokens))]
            context.add(found, hearing.temperature)
            for one in found:
                segment = self._segment(seek, one.start, one.end, one.tokens)
                if segment.text.strip():
                    segments.append(segment)
                    on_segment(segment)
            seek += length if not end else min(length, round(end * window / entries))
        text = "".join(segment.text for segment in segments).strip()
        return Transcript(text, language, seconds, tuple(segments), hearing.speculation)

    def _context(self, prompt: str | Sequence[int], goes_on: bool) -> Context:
        """Make the context of a sound's windows, of which each has room for at least a token."""
        room = self.decoder.bundle.max_length
        most = room // 2 - 1  # as Whisper cuts what was said before
        ids = read_prompt(prompt, self.tokens, self.decoder.tokenizer, most)
        longest = room - 6  # before it is a token, after it are up to four, and one is to be said
        if len(ids) > longest:
            raise RequestError(f"the prompt has {len(ids)} tokens, expected at most {longest}", "prompt")
        return Context(self.tokens, ids, most, goes_on=goes_on)

    def _language(self, source: Source) -> Generator[Window, Output, str]:
        params = SamplingParams(max_new_tokens=1, allowed_token_ids=tuple(self.tokens.languages.values()))
        output: Output = yield Window([self.tokens.start], source, params)
        return next(name for name, token in self.tokens.languages.items() if token == output.token_ids[0])

    def _pictures(self, samples: Tensor) -> tuple[dict[Sound, Tensor], int]:
        """Return the pictures of all of a sound, at least a window, and how many frames are heard."""
        if len(samples) <= min(map(samples_of, self._sounds)):
            return {sound: one_window(samples, sound) for sound in self._sounds}, self._sounds[0].frames
        return {sound: log_mel(samples, sound.bands) for sound in self._sounds}, len(samples) // HOP

    def _source(self, pictures: dict[Sound, Tensor], seek: int) -> Source:
        """Return the window that begins there; after the end of the sound there is nothing."""
        found = {}
        for sound, picture in pictures.items():
            window = torch.zeros(sound.bands, sound.frames)
            part = picture[:, seek : seek + sound.frames]
            window[:, : part.shape[1]] = part
            found[sound] = window
        return Source(pictures=found)

    def _segment(self, seek: int, start: float, end: float, tokens: tuple[int, ...]) -> Segment:
        each = self._sounds[0].frames / self.decoder.bundle.longest_source("target") * HOP / SAMPLE_RATE
        begin = seek * HOP / SAMPLE_RATE
        text = self.decoder.tokenizer.decode([token for token in tokens if token < self.tokens.first_time])
        return Segment(round(begin + start * each, 3), round(begin + end * each, 3), text, tokens)


def _read(samples: Any) -> Tensor:
    try:
        heard = torch.as_tensor(samples, dtype=torch.float32).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"the sound is a {type(samples).__name__}, expected samples ({error})", "samples") from error
    if heard.dim() != 1 or not heard.isfinite().all():
        shape = list(heard.shape)
        raise RequestError(f"the sound has samples {shape}, expected one channel of finite numbers", "samples")
    if len(heard) < HOP:
        raise RequestError(f"the sound is too short: it has {len(heard)} samples, expected at least {HOP}", "samples")
    return heard
