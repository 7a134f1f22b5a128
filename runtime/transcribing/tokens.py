"""Whisper's tokens for languages, tasks and times, found in a bundle's tokenizer by their names, without torch."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engines import RequestError, Speech, TokenizerEntry

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..acceptance.filters import SpeechRules

LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
TASKS = ("transcribe", "translate")
DEAF = "the bundle does not hear as Whisper does ({lack}); export a Whisper"


def require_speech(entry: TokenizerEntry) -> Speech:
    """Return how a model hears; refuse one that does not."""
    if entry.speech is None:
        raise RequestError(DEAF.format(lack="no sound"))
    return entry.speech


@dataclass(frozen=True)
class WhisperTokens:
    """Ids by what they mean."""

    start: int
    end: int
    silent: int  # the token that says that there are no times
    before: int | None  # the token that begins what was said before
    tasks: dict[str, int]  # of a model that knows several languages
    languages: dict[str, int]
    entry: TokenizerEntry

    @classmethod
    def read(cls, entry: TokenizerEntry, tokenizer: "Tokenizer") -> "WhisperTokens":
        """Find them, or say that this is no Whisper."""
        speech = require_speech(entry)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        names = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"
        missing = [name for name in names if name not in vocabulary]
        if missing:
            raise RequestError(DEAF.format(lack=f"no token {missing[0]}"))
        several = speech.multilingual
        found = {name: index for text, index in vocabulary.items() if (name := _language(text))}
        tasks = {task: vocabulary[f"<|{task}|>"] for task in TASKS if f"<|{task}|>" in vocabulary}
        start, end, silent = (vocabulary[name] for name in names)
        before = vocabulary.get("<|startofprev|>")
        return cls(start, end, silent, before, tasks if several else {}, found if several else {}, entry)

    @property
    def first_time(self) -> int:
        return self.silent + 1

    @property
    def no_speech(self) -> int:
        """The token that says that nobody speaks, whatever its name."""
        return self.silent - 1

    def beginning(self, language: str | None, task: str, *, timed: bool) -> list[int]:
        """Return what a text begins with."""
        begin = [self.start]
        if self.languages:
            assert language is not None
            begin += [self.languages[language], self.tasks[task]]
        return begin if timed else [*begin, self.silent]

    def rules(self, *, timed: bool) -> "SpeechRules":
        from ..acceptance.filters import SpeechRules

        own = require_speech(self.entry)
        return SpeechRules(own.begin_unsaid, timed, self.end, self.silent, self.first_time, own.latest_first)

    def check(self, language: str | None, task: str) -> None:
        """Refuse a language or a task that the model does not know."""
        if task not in TASKS or (task != TASKS[0] and not self.tasks):
            known = "transcribe, as it knows English alone" if not self.tasks else " or ".join(TASKS)
            raise RequestError(f"task is {task!r}, expected {known}", "task")
        if language is not None and language not in (self.languages or ("en",)):
            known = ", ".join(sorted(self.languages)) or "en alone"
            raise RequestError(f"language is {language!r}, this model knows {known}", "language")


def _language(token: str) -> str | None:
    match = LANGUAGE.fullmatch(token)
    return match[1] if match else None
