"""Compiles grammars with llguidance. Run as a program, it compiles one after another, within bounds of its own.

It imports nothing of this package, so that such a process starts in a moment.
"""

import json
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FUEL = 200_000  # for the initial lexer, a fifth of the library's own limit
MOST_SAID = 300  # characters of what is wrong with a grammar
WHITESPACE = r" ?(\r?\n[ \t]{0,40})?"  # between the parts of JSON: without a bound a model may write nothing else
SETTINGS = re.compile(r"oneOf constraints are not supported\. Enable 'coerce_one_of' .* anyOf")
OVERLAP = "a text may fit several alternatives of oneOf, which cannot be excluded; say anyOf"
UNKNOWN = re.compile(r"Unimplemented keys: \[(.*?)\]")
INNER = "\ue000"  # what rules around another grammar call it by
MEMORY_BYTES = 512 * 2**20  # beyond what the tokenizer takes; a healthy grammar takes a few MiB


def open_tokenizer(text: str, vocab_size: int, ends: Sequence[int]) -> "LLTokenizer":
    """Open a tokenizer by the text of its file."""
    from llguidance import LLTokenizer

    return LLTokenizer(with_plain_spaces(text), n_vocab=vocab_size, eos_token=list(ends))


def compile_grammar(tokenizer: "LLTokenizer", kind: str, text: str) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)
    return LLMatcher(tokenizer, in_its_form(kind, text), log_level=0, limits=limits)


def in_its_form(kind: str, text: str) -> str:
    """Write a grammar in the library's own form."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match kind:
        case "json_schema":
            return str(LLMatcher.grammar_from_json_schema(json.dumps(bounded(json.loads(text)))))
        case "lark":
            return json.dumps({"grammars": [{"lark_grammar": text}]})
        case "gbnf":
            return in_its_form("lark", any_to_lark(text))
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "choice":
            return str(LLMatcher.grammar_from_regex(one_of(json.loads(text))))
        case _:
            return around(*json.loads(text))


def around(rules: str, kind: str, text: str) -> str:
    """Put rules in Lark around another grammar, which they call by INNER."""
    inside = json.loads(in_its_form(kind, text))["grammars"]
    inside[0]["name"] = name = f"inner_{len(inside)}"  # which no grammar within it has
    return json.dumps({"grammars": [{"lark_grammar": rules.replace(INNER, f"@{name}")}, *inside]})


def bounded(schema: Any) -> Any:
    """Bound the white space of a schema, unless it has settings of its own under x-guidance."""
    if schema is True:
        schema = {}
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}} | schema if isinstance(schema, dict) else schema


def with_plain_spaces(tokenizer: str) -> str:
    """Spell out what the decoder Metaspace does to single tokens, because llguidance does not know it by that name."""
    fields = json.loads(tokenizer)
    decoder = fields.get("decoder") or {}
    if decoder.get("type") != "Metaspace":
        return tokenizer
    replace = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    return json.dumps(
        fields | {"decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}}
    )


def one_of(strings: Sequence[str]) -> str:
    """Return the regex of these strings alone."""
    return "|".join(
        "".join(letter if letter.isalnum() else rf"\x{{{ord(letter):x}}}" for letter in text) for text in strings
    )


def in_our_words(said: str) -> str:
    """Say what the library refuses without the names of its own settings."""
    return SETTINGS.sub(OVERLAP, UNKNOWN.sub(r"the schema has \1, which cannot be enforced", said))


def main() -> None:
    """Read a tokenizer, then grammars, each a JSON list on a line, and say of each in a line what is wrong with it."""
    tokenizer = open_tokenizer(*json.loads(sys.stdin.readline()))
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        fields: Any = json.loads(line)
        try:
            said = compile_grammar(tokenizer, *fields).get_error()
        except Exception as error:  # the library raises plain Exceptions, also where memory ends
            said = str(error) or type(error).__name__
        print(json.dumps(in_our_words(" ".join(said.split()))[:MOST_SAID]), flush=True)


if __name__ == "__main__":
    main()
