"""Write down what is said in sound files, by a bundle of a Whisper. A draft only makes the text come sooner."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from ...engines import Bundle, RequestError
from ...runtime.transcribing.fallback import NONE, USUAL, Fallback, usual_above
from ...runtime.transcribing.tokens import TASKS, WhisperTokens, require_speech
from ...runtime.transcribing.transcript import Segment
from ..flags.controller import add_controller_flags, draft_length, refuse_drafting, refuse_lacking
from ..flags.engine import add_engine_flags, engine_name, open_decoder
from ..flags.sampling import add_sampling_flags, flag, given_fields, sampling_params
from ..in_words import summary
from ..transcripts import FORMATS, clock
from ..whole_file import whole_file

THRESHOLDS = {
    "compression_ratio_threshold": "a text repeats itself whose tokens compress better",
    "logprob_threshold": "a text is unlikely whose tokens have less log-probability on average",
    "no_speech_threshold": "nobody speaks where silence is likelier than that and the text is unlikely",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="WAV, or whatever ffmpeg reads")
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="the folder that export-models wrote")
    parser.add_argument("--language", metavar="L", help="what is spoken, as en (default: what the model hears)")
    parser.add_argument("--translate", action="store_true", help="write it down in English, whatever is spoken")
    parser.add_argument("--no-times", action="store_true", help="ask for no times; sound of more than 30 s needs them")
    parser.add_argument("--prompt", metavar="T", default="", help="what was said before, or words to expect")
    parser.add_argument(
        "--condition-on-prev-tokens",
        action="store_true",
        help="let each window's context be what has been heard (default: the prompt alone)",
    )
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="hear a window again at higher temperatures, up to 1, where its text is unlikely or repeats itself, and "
        "leave it out where nobody speaks (default: each window is heard once)",
    )
    for name, help_text in THRESHOLDS.items():
        usual = getattr(USUAL, name)
        parser.add_argument(flag(name), metavar="X", type=float, help=f"of --fallback: {help_text} (default {usual})")
    add_sampling_flags(parser, only=("temperature", "seed"), temperature=0.0)
    parser.add_argument("--format", choices=FORMATS, default="txt", help="what to write (default txt)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="write FILE.txt, FILE.srt … there (default: to standard output)"
    )
    add_engine_flags(parser)
    add_controller_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and not arguments.out.is_dir():
        raise RequestError(f"--out {arguments.out} is no directory; make it first")
    for file in arguments.files:
        if not file.is_file():
            raise RequestError(f"sound file {file} is not there; name another")
    if arguments.out is None and len(arguments.files) > 1 and arguments.format in ("srt", "vtt"):
        raise RequestError(f"{arguments.format} of several files is none of one; name a folder by --out")
    stems = [file.stem for file in arguments.files]
    if arguments.out is not None and (twice := [stem for stem in stems if stems.count(stem) > 1]):
        raise RequestError(f"two files would become {twice[0]}.{arguments.format}; name one of them otherwise")
    given_fields(arguments)
    refuse_drafting(arguments)
    engine_name(arguments)
    _refuse_in_bundle(arguments)
    from ...runtime.transcribing.transcriber import Transcriber
    from ..sound_files import read_sound

    with open_decoder(arguments, max_batch=1) as decoder:
        transcriber = Transcriber(decoder)
        for file in arguments.files:
            samples = read_sound(file)
            transcript = transcriber.transcribe(
                samples,
                language=arguments.language,
                task=TASKS[arguments.translate],
                timed=not arguments.no_times,
                params=sampling_params(arguments),
                fallback=_fallback(arguments),
                prompt=arguments.prompt,
                goes_on=arguments.condition_on_prev_tokens,
                draft_length=draft_length(arguments),
                drafter=arguments.drafter,
                on_segment=_show if arguments.out is not None or sys.stderr.isatty() else lambda segment: None,
            )
            written = FORMATS[arguments.format](transcript)
            if arguments.out is None:
                print(written, end="")
            else:
                with whole_file(arguments.out / f"{file.stem}.{arguments.format}") as out:
                    out.write(written)
            print(f"{file}: {transcript.seconds:.1f} s; {summary(transcript.speculation)}", file=sys.stderr)
    return 0


def _refuse_in_bundle(arguments: argparse.Namespace) -> None:
    """Refuse what the bundle rules out, before it is opened."""
    bundle = Bundle.read(arguments.bundle)
    require_speech(bundle.tokenizer)
    refuse_lacking(bundle, arguments, draft_length(arguments), batch=1)
    from ...runtime.requests.prompts import read_tokenizer

    tokens = WhisperTokens.read(bundle.tokenizer, read_tokenizer(bundle))
    tokens.check(arguments.language, TASKS[arguments.translate])


def _fallback(arguments: argparse.Namespace) -> Fallback:
    """Return the usual fallback with the thresholds that were given, none if neither was asked for."""
    given = {name: value for name in THRESHOLDS if (value := getattr(arguments, name)) is not None}
    return replace(usual_above(arguments.temperature), **given) if given or arguments.fallback else NONE


def _show(segment: Segment) -> None:
    print(f"[{clock(segment.start)} --> {clock(segment.end)}] {segment.text.strip()}", file=sys.stderr, flush=True)
