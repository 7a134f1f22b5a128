"""The marks around a model's reasoning, by the names that other servers have for them. It imports no library."""

from collections.abc import Sequence

from ...engines import RequestError

Marks = tuple[str, str]

PARSERS: dict[str, Marks] = {
    "deepseek_r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


def refuse_parser(parser: str) -> None:
    if parser not in PARSERS:
        raise RequestError(f"--reasoning-parser is {parser!r}, expected one of {', '.join(PARSERS)}")


def marks_of(parser: str, special: Sequence[str]) -> Marks:
    """Return the marks of a parser, which have to be text and not `special` tokens."""
    refuse_parser(parser)
    marks = PARSERS[parser]
    if hidden := set(marks).intersection(special):
        raise RequestError(
            f"--reasoning-parser {parser} looks for {sorted(hidden)[0]}, which is a special token of this tokenizer "
            "and is in no text; leave the flag out"
        )
    return marks
