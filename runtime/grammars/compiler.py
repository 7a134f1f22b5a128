"""Compiles grammars for the vocabulary of one bundle; those that would take too long are refused."""

import json
import threading
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from ...engines import Bundle, BundleError, RequestError
from ...engines.errors import first_line
from .grammar import Grammar, read_json
from .guide import Guide
from .trials import Trials, Untried
from .with_llguidance import compile_grammar, open_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


LARGEST_MULTIPLE = 10_000  # the automaton of multipleOf has a state for each remainder, and no limit of its own
MOST_KNOWN = 64  # grammars that are kept, compiled or refused


class Constraints(Protocol):
    """The part of a request that says what its text may be."""

    @property
    def grammar(self) -> Grammar | None: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    def banned(self, vocab_size: int) -> set[int]: ...


class Compiler:
    """Makes the guides of one decoder's requests; the library is loaded by the first."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._vocab_size = bundle.tokenizer.vocab_size
        self._trials: Trials | None = None
        self._lock = threading.Lock()
        self._outcome = lru_cache(MOST_KNOWN)(self._try)

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
        banned = sorted(asked.banned(self._vocab_size))
        return Guide(self.compiled(asked.grammar), self._vocab_size, {*ends, *asked.stop_token_ids}, banned)

    @cached_property
    def _file(self) -> str:
        file = self._bundle.tokenizer_file
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{file} cannot be used with a grammar ({first_line(error)})") from error

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        try:
            return open_tokenizer(self._file, self._vocab_size, self._bundle.tokenizer.eos_token_ids)
        except ImportError as error:
            raise RequestError("a grammar needs llguidance; pip install 'trt-spec[grammar]'") from error
        except Exception as error:  # the library raises plain Exceptions
            file = self._bundle.tokenizer_file
            raise BundleError(f"{file} cannot be used with a grammar ({first_line(error)})") from error

    def close(self) -> None:
        """End the process in which grammars are tried."""
        if self._trials is not None:
            self._trials.close()

    @property
    def given_up(self) -> int:
        """The number of grammars that ended the process in which they were tried, by time or memory."""
        return 0 if self._trials is None else self._trials.ended

    def compiled(self, grammar: Grammar) -> "LLMatcher":
        """Compile a grammar, or refuse it; services ask for few again and again, and both are kept."""
        outcome = self._outcome(grammar)
        if isinstance(outcome, RequestError):
            raise RequestError(str(outcome), outcome.field)
        return outcome

    def _try(self, grammar: Grammar) -> "LLMatcher | RequestError":
        try:
            return self._compile(grammar)
        except Untried:
            raise
        except RequestError as error:
            return error

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        tokenizer = self._tokenizer
        _require_small_multiples(grammar)
        with self._lock:
            if self._trials is None:
                self._trials = Trials(self._file, self._vocab_size, self._bundle.tokenizer.eos_token_ids)
        self._trials.require(grammar.kind, grammar.text)
        return compile_grammar(tokenizer, grammar.kind, grammar.text)


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
    """Yield every JSON schema in a grammar; Lark grammars have them after %json."""
    if grammar.kind == "json_schema":
        yield read_json(grammar.text)
    elif grammar.kind == "around":
        rules, *inside = read_json(grammar.text)
        yield from _schemas(Grammar.lark(rules))
        yield from _schemas(Grammar(*inside))
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
