import argparse
import math
from dataclasses import fields

import pytest
from trt_spec.runtime import Grammar, RequestError, SamplingParams
from trt_spec.runtime.acceptance.parameter_fields import HELP
from trt_spec.tools.flags.sampling import add_sampling_flags, flag, sampling_params

from ..conftest import assert_refused

GIVEN = {
    "max_new_tokens": (["7"], 7),
    "temperature": (["0.5"], 0.5),
    "draft_temperature": (["0"], 0.0),
    "top_k": (["9"], 9),
    "top_p": (["0.75"], 0.75),
    "min_p": (["0.1"], 0.1),
    "repetition_penalty": (["1.2"], 1.2),
    "presence_penalty": (["-0.5"], -0.5),
    "frequency_penalty": (["0.25"], 0.25),
    "logit_bias": (["3=1.5", "4=-inf"], {3: 1.5, 4: -math.inf}),
    "stop": (["one", "two three"], ["one", "two three"]),
    "stop_token_ids": (["5", "6"], [5, 6]),
    "ignore_eos": ([], True),
    "min_tokens": (["3"], 3),
    "seed": (["11"], 11),
    "logprobs": (["2"], 2),
    "prompt_logprobs": (["1"], 1),
    "rule": (["coupled"], "coupled"),
    "lenience": (["0.5"], 0.5),
}


def parse(*arguments: str) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return sampling_params(parser.parse_args(arguments))


@pytest.mark.parametrize("name", GIVEN)
def test_every_field_has_a_flag_that_reaches_it_and_no_other(name):
    texts, value = GIVEN[name]
    arguments = [part for text in texts for part in (flag(name), text)] or [flag(name)]
    params = parse(*arguments)
    assert params == SamplingParams(**{name: value})
    assert params != SamplingParams()


def test_a_grammar_comes_from_a_file_or_a_flag(tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "g.lark"
    schema.write_text('{"type": "object"}')
    lark.write_text('start: "a"')
    assert parse("--json-schema", str(schema)).grammar == Grammar.json_object()
    assert parse("--grammar", str(lark)).grammar == Grammar.lark('start: "a"')
    assert parse("--regex", "a+").grammar == Grammar.regex("a+")


def test_a_grammar_that_cannot_be_read_is_refused(run, tmp_path):
    request = ("generate", "--bundle", "never-opened", "--prompt", "a")
    assert_refused(run(*request, "--grammar", tmp_path), f"grammar {tmp_path} cannot be read (Is a directory)")
    (tmp_path / "schema").write_text("{")
    assert_refused(run(*request, "--json-schema", tmp_path / "schema"), "the JSON schema is not JSON (")


def test_every_field_has_a_help_text():
    assert set(HELP) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("text", "value"), [("0.5", 0.5), ("true", True), ("[3, 4]", [3, 4]), ('"5"', "5"), ("a=b", "a=b"), ("", "")]
)
def test_what_an_added_filter_reads_is_json_or_else_text(text, value):
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    assert parser.parse_args(["--extra", f"reach={text}"]).extra == [("reach", value)]
    with pytest.raises(RequestError, match=r"extra is \{'reach': .*, expected a mapping with no keys but"):
        parse("--extra", f"reach={text}")


def test_no_flag_means_the_defaults():
    assert parse() == SamplingParams()


def test_a_command_may_fix_a_field():
    assert sampling_params(argparse.Namespace(unrelated=1, top_k=3), ignore_eos=True) == SamplingParams(
        top_k=3, ignore_eos=True
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0, expected 0 or a number from 1e-05 to 100000"),
        (["--temperature", "nan"], "temperature is nan, expected 0 or a number from 1e-05 to 100000"),
        (["--top-p", "0"], "top_p is 0.0, expected a number in (0, 1]"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0, expected a whole number >= 1"),
        (["--rule", "best"], "rule is 'best', expected one of rejection, tokenwise, coupled"),
    ],
)
def test_a_bad_value_is_refused_by_the_library_itself(run, llama, arguments, message):
    with pytest.raises(RequestError):
        parse(*arguments)
    assert_refused(run("generate", "--bundle", llama.bundle, "--prompt", "a", *arguments), message)


def test_a_bias_that_is_no_pair_is_refused(run):
    result = run("generate", "--bundle", "b", "--prompt", "a", "--logit-bias", "3:1")
    assert_refused(result, "argument --logit-bias: '3:1' is not ID=VALUE, expected for instance 42=-1.5")
