"""A grammar is refused by a sentence, in a second, before anything runs; it reads no file."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from trt_spec.runtime import Decoder, Grammar, RequestError, SamplingParams
from trt_spec.runtime.grammars import compiler as compiler_module
from trt_spec.runtime.grammars import trials
from trt_spec.runtime.grammars.compiler import Compiler
from trt_spec.runtime.grammars.guide import Guide
from trt_spec.runtime.grammars.with_llguidance import one_of

from ...kit.bundles import Pair
from .vocabularies import DEMO, vocabulary


def compiled(compiler: Compiler, grammar: Grammar) -> Guide:
    guide = compiler.guide(SamplingParams(grammar=grammar))
    assert guide is not None
    return guide


EXPLODE = {
    "nested schemas": Grammar.json_schema('{"anyOf": [' * 200 + "{}" + "]}" * 200),
    "many properties": Grammar.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(6000)}}),
    "products of choices": Grammar.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(10)]} for i in range(10)]}
    ),
    "many values": Grammar.json_schema({"enum": [f"x{i}" for i in range(20_000)]}),
    "a remainder": Grammar.json_schema({"type": "integer", "multipleOf": 99_999_989}),
    "a remainder in Lark": Grammar.lark('start: %json {"type": "integer", "multiple\\u004ff": 9999998.9}'),
    "parentheses": Grammar.regex("(" * 20_000 + "a" + ")" * 20_000),
    "parentheses in Lark": Grammar.lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "a long text": Grammar.regex("a" * 200_000),
    "many rules": Grammar.lark("start: r0\n" + "\n".join(f'r{i}: "k{i}" r{i * 7 % 9000}' for i in range(9000))),
    "repeated repetitions": Grammar.regex("((a{1,100}){1,100}){1,100}"),
    "many ways to read": Grammar.lark('start: a\na: a a | a a a | "x" | '),
    "an exponential automaton": Grammar.regex("[ab]*a[ab]{30}"),
}


@pytest.mark.parametrize("name", EXPLODE)
def test_what_explodes_is_refused_or_harmless(compiler: Compiler, name: str) -> None:
    """If it compiles in the time that it has, then each further step has limits of its own."""
    try:
        guide = compiled(compiler, EXPLODE[name])
    except RequestError:
        return
    tokens: list[int] = []
    for _ in range(3):
        [bits] = guide.allowed(tokens, 1)
        tokens.append(int(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[-1]))


@pytest.mark.parametrize("name", ["a remainder", "a remainder in Lark"])
def test_a_multiple_is_refused_whose_automaton_would_be_large(compiler: Compiler, name: str) -> None:
    with pytest.raises(RequestError, match=r"the grammar's multipleOf is [\d.]+, expected at most 10,000 without its"):
        compiled(compiler, EXPLODE[name])
    compiled(compiler, Grammar.json_schema({"type": "number", "multipleOf": 0.01}))


TWO_REMAINDERS = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}  # a gigabyte of states


def test_work_that_takes_too_long_ends_with_its_process_and_is_refused_at_once_when_asked_again() -> None:
    own = Compiler(DEMO)
    for _ in range(3):
        with pytest.raises(RequestError, match=r"takes longer than 0\.9 s to compile; simplify it"):
            own.compiled(Grammar.json_schema(TWO_REMAINDERS))
        assert own.given_up == 1
    compiled(own, Grammar.regex("a+"))
    process = own._trials._process
    assert process.poll() is None
    own.close()
    assert process.poll() is not None


def test_a_grammar_of_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SECONDS", 60)
    own = Compiler(DEMO)
    with pytest.raises(RequestError, match=r"by too much memory|cannot be compiled"):  # as the library meets the limit
        own.compiled(Grammar.json_schema(TWO_REMAINDERS))
    own.close()


def test_what_could_not_be_tried_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Compiler(DEMO)
    compiled(own, Grammar.regex("b"))
    monkeypatch.setattr(trials, "WAIT_SECONDS", 0.01)
    with (
        own._trials._lock,
        pytest.raises(RequestError, match="too many grammars are waiting to be compiled; try again"),
    ):
        own.compiled(Grammar.regex("a"))
    compiled(own, Grammar.regex("a"))
    monkeypatch.setattr(trials.sys, "executable", "/no/such/python")
    own.close()
    with pytest.raises(RequestError, match="no process can be started to compile a grammar in"):
        own.compiled(Grammar.regex("e"))


def test_a_process_that_has_died_is_started_again_and_no_grammar_is_blamed() -> None:
    own = Compiler(DEMO)
    for grammar in (Grammar.regex("a"), Grammar.regex("b"), Grammar.regex("c")):
        compiled(own, grammar)
        own._trials._process.kill()
        own._trials._process.wait()
    assert own.given_up == 0
    own.close()


def test_a_grammar_that_ends_the_process_twice_is_told_so_and_refused_at_once_when_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one does that makes the library abort."""
    program = Path(trials.with_llguidance.__file__).read_text(encoding="utf-8")
    planted = program.replace(
        "fields: Any = json.loads(line)", "fields: Any = json.loads(line); '!' in line and os._exit(6)"
    )
    assert planted != program
    (tmp_path / "with_llguidance.py").write_text(f"import os\n{planted}", encoding="utf-8")
    monkeypatch.setattr(trials.with_llguidance, "__file__", str(tmp_path / "with_llguidance.py"))
    own, started = Compiler(DEMO), []
    popen = trials.subprocess.Popen
    monkeypatch.setattr(trials.subprocess, "Popen", lambda *args, **named: started.append(1) or popen(*args, **named))
    for _ in range(3):
        with pytest.raises(RequestError, match="has ended twice over it, by too much memory or a fault of the library"):
            own.compiled(Grammar.regex("!"))
        assert (own.given_up, len(started)) == (1, 2)
    compiled(own, Grammar.regex("a"))
    own.close()


def test_a_decoder_that_closes_ends_the_process_of_its_grammars(llama: Pair) -> None:
    with Decoder.open(llama.bundle) as decoder:
        decoder.compile_grammar(Grammar.regex("a"))
        process = decoder._intake.grammars._trials._process
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
        (
            Grammar.json_schema({"uniqueItems": True, "type": "array"}),
            'the schema has "uniqueItems", which cannot be enforced',
        ),
        (
            Grammar.json_schema({"oneOf": [{"type": "string"}, {"maxLength": 3}]}),
            "a text may fit several alternatives of oneOf, which cannot be excluded; say anyOf",
        ),
        (Grammar.json_schema({"$ref": "file:///etc/passwd"}), "Default retriever does not fetch resources"),
        (Grammar.json_schema({"$ref": "https://example.com/schema"}), "Default retriever does not fetch resources"),
        (Grammar.json_schema("[1]"), "schema"),
        (Grammar.json_schema("5"), "schema"),
        (Grammar.regex("(a"), "error: unclosed group"),
        (Grammar.lark("start: b"), 'unknown name: "b"'),
        (Grammar.lark('%import /etc/passwd\nstart: "a"'), "Expected name"),
        (Grammar.lark('%import python.NAME\nstart: "a"'), "Unknown common"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_librarys_reason(
    compiler: Compiler, grammar: Grammar, message: str
) -> None:
    name = {"json_schema": "JSON schema", "regex": "regular expression"}.get(grammar.kind, "grammar")
    with pytest.raises(RequestError, match=re.escape(f"the {name} cannot be compiled (")) as caught:
        compiled(compiler, grammar)
    assert message in str(caught.value)


def takes(compiler: Compiler, grammar: Grammar, text: str) -> bool:
    matcher = compiler.compiled(grammar).deep_copy()
    tokens = Tokenizer.from_file(str(DEMO.tokenizer_file)).encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}}
BEINGS = {"oneOf": [CAT, {"type": "object", "properties": {"kind": {"const": "tree"}}}]}
for being in BEINGS["oneOf"]:
    being["required"] = ["kind"]


def test_alternatives_that_a_constant_tells_apart_are_taken(compiler: Compiler) -> None:
    grammar = Grammar.json_schema(BEINGS)
    assert takes(compiler, grammar, '{"kind": "cat", "lives": 9}')
    assert not takes(compiler, grammar, '{"kind": "dog"}')


CALL = Grammar.from_tools([{"type": "function", "function": {"name": "f", "parameters": CAT}}], "required")


@pytest.mark.parametrize("before", ["", '{"name": "f", "arguments": '])
def test_white_space_in_json_is_bounded_unless_the_schema_says_otherwise(compiler: Compiler, before: str) -> None:
    grammar, after = (CALL, "}") if before else (Grammar.json_schema(CAT), "")
    assert grammar is not None

    def taken(text: str) -> bool:
        return takes(compiler, grammar, before + text + after)

    cat = {"kind": "cat", "lives": 9}
    for indent in (None, 0, 2, 8, "\t"):
        assert taken(json.dumps(cat, indent=indent))
    assert taken('{ "kind" : "cat" }')
    assert taken(json.dumps(cat, separators=(",", ":")))
    assert taken(json.dumps(cat, indent=2).replace("\n", "\r\n"))
    assert taken("{\n" + " " * 40 + '"kind": "cat"}')
    for run in (" " * 41, "\n\n", "\t", "\n" + " " * 41):
        assert not taken("{" + run + '"kind": "cat"}')
    own = CAT | {"x-guidance": {"whitespace_pattern": r"[ \n]*"}}
    assert takes(compiler, Grammar.json_schema(own), "{" + " " * 99 + '"kind": "cat"}')


def test_any_json_has_bounded_white_space_too(compiler: Compiler) -> None:
    assert takes(compiler, Grammar.json_schema(True), "[1, 2]")
    assert not takes(compiler, Grammar.json_schema(True), "[1,\n\n2]")


def test_the_library_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=re.escape("a grammar needs llguidance; pip install 'trt-spec[grammar]'")):
        compiled(Compiler(DEMO), Grammar.regex("a"))


def test_a_bundle_without_an_end_of_sequence_has_no_grammars() -> None:
    bundle = DEMO
    endless = replace(bundle, tokenizer=replace(bundle.tokenizer, eos_token_ids=()))
    with pytest.raises(RequestError, match="names no end-of-sequence token, with which a text under a grammar"):
        compiled(Compiler(endless), Grammar.regex("a"))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=4))
def test_a_choice_allows_its_strings_alone(compiler: Compiler, strings: list[str]) -> None:
    for text in {*strings, strings[0] + "a", strings[-1][:-1]}:
        guide = compiled(compiler, Grammar.choice(strings))
        tokenizer = Tokenizer.from_file(str(compiler._bundle.tokenizer_file))
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(tokens) != text:
            continue  # a text that this tokenizer cannot spell
        complete = guide.follow([*tokens, 0]) == len(tokens) + 1 and not guide.error
        assert complete == (text in strings)


def test_the_regex_of_a_choice_takes_every_sign_as_itself() -> None:
    assert one_of(["a.b", "é\n"]) == r"a\x{2e}b|é\x{a}"


SPELLED_OUT = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize("decoder", [SPELLED_OUT, decoders.Metaspace()])
def test_tokens_that_mark_spaces_and_spell_bytes_are_understood(tmp_path: Path, decoder: object) -> None:
    """As sentencepiece's do: ▁ begins a word, and <0xC3> is a byte."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "é"]
    words = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(words, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = Compiler(vocabulary(tmp_path, len(names), eos=1))
    spellings = [("b", "▁a", "é"), ("b", "▁", "a", "é")]
    if decoder is SPELLED_OUT:
        spellings.append(("b", "<0x20>", "a", "<0xC3>", "<0xA9>"))
    for spelled in spellings:
        guide = compiled(compiler, Grammar.regex("[ab]*( [ab]*[éü])*"))
        tokens = [words[name] for name in spelled]
        assert guide.follow([*tokens, 1]) == len(tokens) + 1, guide.error
    guide = compiled(compiler, Grammar.regex("b( a|  b)"))
    assert guide.follow([words["b"], words["a"]]) == 1, "the space is missing"


def test_a_tokenizer_that_the_library_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unknown"}}))
    bundle = replace(DEMO, path=tmp_path)
    with pytest.raises(compiler_module.BundleError, match=r"tokenizer\.json cannot be used with a grammar \("):
        compiled(Compiler(bundle), Grammar.regex("a"))
