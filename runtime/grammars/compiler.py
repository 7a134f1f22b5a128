"""Compiles grammars for the vocabulary of one bundle; those that would take too long are refused."""

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from ...engines import Bundle, BundleError, RequestError
from ...engines.errors import first_line, one_line
from .grammar import Grammar, read_json
from .guide import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


SECONDS = 0.9  # to compile a grammar; a healthy one takes milliseconds
LARGEST_MULTIPLE = 10_000  # the automaton of multipleOf has a state for each remainder, and no limit of its own
MOST_KNOWN = 64  # grammars that are kept compiled
FUEL = 200_000  # for the initial lexer, a fifth of the library's own limit


class Constraints(Protocol):
    """The part of a request that says what its text may be."""

    @property
    def grammar(self) -> Grammar | None: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...


class Compiler:
    """Makes the guides of one decoder's requests; the library is loaded by the first."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._vocab_size = bundle.tokenizer.vocab_size
        self.compiled = lru_cache(MOST_KNOWN)(self._compile)  # services ask for few grammars again and again

    def guide(self, asked: Constraints) -> Guide | None:
        """Compile the grammar of a request; None if it has none."""
        if asked.grammar is None:
            return None
        ends = self._bundle.tokenizer.eos_token_ids
        if not ends:
            raise RequestError(
                "the bundle names no end-of-sequence token, with which a text under a grammar has to end; export the "
                "bundle again from a checkpoint that has one"
            )
        banned = [token for token, bias in asked.logit_bias.items() if bias == -math.inf]
        return Guide(self.compiled(asked.grammar), self._vocab_size, {*ends, *asked.stop_token_ids}, banned)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise RequestError("a grammar needs llguidance; pip install 'trt-spec[grammar]'") from error
        file = self._bundle.tokenizer_file
        try:
            text = file.read_text(encoding="utf-8")
            return LLTokenizer(
                with_plain_spaces(text), n_vocab=self._vocab_size, eos_token=list(self._bundle.tokenizer.eos_token_ids)
            )
        except Exception as error:  # the library raises plain Exceptions
            raise BundleError(f"{file} cannot be used with a grammar ({first_line(error)})") from error

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        _require_small_multiples(grammar)
        limits = LLParserLimits(initial_lexer_fuel=FUEL, verbose_errors=False)

        def compiled() -> LLMatcher:
            match grammar.kind:
                case "json_schema":
                    source = LLMatcher.grammar_from_json_schema(grammar.text)
                case "lark":
                    source = LLMatcher.grammar_from_lark(grammar.text)
                case "regex":
                    source = LLMatcher.grammar_from_regex(grammar.text)
                case "choice":
                    source = LLMatcher.grammar_from_regex(one_of(read_json(grammar.text)))
            return LLMatcher(tokenizer, source, log_level=0, limits=limits)

        matcher = within(SECONDS, compiled)
        if error := matcher.get_error():
            raise RequestError(
                f"the grammar cannot be compiled ({one_line(error)[:300]}); mend or simplify it", "grammar"
            )
        return matcher


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


def within(seconds: float, work: Callable[[], "LLMatcher"]) -> "LLMatcher":
    """Return what `work` makes; give it up if it takes longer."""
    made: list[LLMatcher | Exception] = []

    def run() -> None:
        try:
            made.append(work())
        except Exception as error:  # the library raises plain Exceptions
            made.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise RequestError(f"the grammar takes longer than {seconds:g} s to compile; simplify it", "grammar")
    if isinstance(made[0], Exception):
        raise RequestError(f"the grammar cannot be compiled ({first_line(made[0])}); mend it", "grammar") from made[0]
    return made[0]


def one_of(strings: Sequence[str]) -> str:
    """Return the regex of these strings alone."""
    return "|".join(
        "".join(letter if letter.isalnum() else rf"\x{{{ord(letter):x}}}" for letter in text) for text in strings
    )


def _require_small_multiples(grammar: Grammar) -> None:
    for schema in _schemas(grammar):
        for value in _values_of("multipleOf", schema):
            try:
                digits = int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))
            except (InvalidOperation, ValueError):
                continue  # the library says what is wrong with it
            if digits > LARGEST_MULTIPLE:
                raise RequestError(
                    f"the grammar's multipleOf is {value!r}, expected at most {LARGEST_MULTIPLE:,} without its decimal "
                    "point; choose a smaller one",
                    "grammar",
                )


def _schemas(grammar: Grammar) -> Iterator[Any]:
    """Yield every JSON schema in a grammar; Lark grammars have them behind %json."""
    if grammar.kind == "json_schema":
        yield read_json(grammar.text)
    elif grammar.kind == "lark":
        for after in grammar.text.split("%json")[1:]:
            try:
                yield json.JSONDecoder().raw_decode(after.lstrip())[0]
            except (ValueError, RecursionError):
                continue  # the library says what is wrong with it


def _values_of(key: str, tree: Any) -> Iterator[Any]:
    todo = [tree]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            if key in one:
                yield one[key]
            todo += one.values()
        elif isinstance(one, list):
            todo += one
