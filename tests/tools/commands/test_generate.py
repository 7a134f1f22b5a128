import io
import json
from itertools import pairwise

import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.cli import main

from ..conftest import assert_refused

KEYS = {"text", "token_ids", "finish_reason", "seed", "usage", "lossless", "speculation", "timing"}
SPECULATION = {"rounds", "proposed", "examined", "accepted", "acceptance", "yield", "tokens_per_round", "histogram"}
TIMING = {"seconds", "seconds_to_first_token", "tokens_per_second", "draft_ms", "verify_ms", "accept_ms", "host_ms"}
PROMPT = "def main"
FEW = ("--max-new-tokens", 12, "--ignore-eos")


@pytest.fixture
def generate(run, llama):
    return lambda *arguments: run("generate", "--bundle", llama.bundle, *arguments)


def expected(llama, **params):
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        return decoder.generate(PROMPT, SamplingParams(max_new_tokens=12, ignore_eos=True, **params))[0]


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_the_json_object_has_what_the_library_gives(generate, llama):
    result = generate("--prompt", PROMPT, "--json", *FEW)
    assert (result.code, result.err) == (0, "")
    found, output = json.loads(result.out), expected(llama)
    assert set(found) == KEYS
    assert (found["text"], tuple(found["token_ids"])) == (output.text, output.token_ids)
    assert found["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": output.usage.prompt_tokens, "completion_tokens": 12}
    assert set(found["speculation"]) >= SPECULATION
    assert found["speculation"] == output.speculation.to_json()
    assert set(found["timing"]) == TIMING
    assert found["timing"]["tokens_per_second"] == pytest.approx(12 / found["timing"]["seconds"])


def test_a_further_draft_proposes_if_it_is_asked_for(run, generate, llama, drafts):
    asked = ("--prompt", PROMPT, *FEW, "--json", "--drafter", "model2", "--draft-length", 3)
    found = json.loads(run("generate", "--bundle", drafts.bundle, *asked).out)
    assert tuple(found["token_ids"]) == expected(llama).token_ids
    assert found["speculation"]["proposed"] > 0
    assert_refused(generate(*asked), "the bundle has no draft2, which drafter model2 runs")


def test_a_chat_model_is_asked_by_its_template(generate, llama, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role[0] }} {{ m.content }}1{% endfor %}")
    template = ("--chat-template", tmp_path / "t.jinja")
    asked = generate("--prompt", "main", "--system", "be", "--chat", *template, *FEW).out
    assert asked == generate("--prompt", "s be1u main1", *FEW).out
    assert_refused(generate("--prompt", "main", *template), "but --chat is missing; add it")
    assert_refused(generate("--prompt", "main", "--chat"), "has no chat template; give one with --chat-template FILE")


def test_the_text_is_printed_alone(generate, llama):
    assert generate("--prompt", PROMPT, *FEW).out == expected(llama).text + "\n"


def test_streamed_pieces_add_up_to_the_text(generate, llama):
    assert generate("--prompt", PROMPT, *FEW, "--stream").out == expected(llama).text + "\n"


def test_streamed_pieces_come_one_by_one_and_flushed(llama, monkeypatch):
    writes = []

    class Recorder(io.StringIO):
        def flush(self):
            writes.append(self.getvalue())

    monkeypatch.setattr("sys.stdout", Recorder())
    main(["generate", "--bundle", str(llama.bundle), "--prompt", PROMPT, *map(str, FEW), "--stream"])
    assert len(set(writes)) > 2
    assert all(later.startswith(earlier) for earlier, later in pairwise(writes))


def test_the_prompt_may_come_from_a_file_or_standard_input_unchanged(generate, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a b\n")
    stdin(monkeypatch, b"a b\n")
    from_file = json.loads(generate("--prompt-file", file, "--json", *FEW).out)
    from_stdin = json.loads(generate("-", "--json", *FEW).out)
    from_flag = json.loads(generate("--prompt", "a b\n", "--json", *FEW).out)
    assert from_file["token_ids"] == from_stdin["token_ids"] == from_flag["token_ids"]
    assert from_file["usage"] == from_stdin["usage"] == from_flag["usage"]


def test_sampling_flags_draft_length_and_drafter_are_obeyed(generate, llama):
    arguments = ("--prompt", PROMPT, "--json", *FEW, "--temperature", 1, "--seed", 7, "--logprobs", 2, "--draft-length")
    found = json.loads(generate(*arguments, 2).out)
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=7, logprobs=2)
        output = decoder.generate(PROMPT, params, draft_length=2)[0]
    assert (found["seed"], found["token_ids"]) == (7, list(output.token_ids))
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    assert [len(entry["top"]) for entry in found["logprobs"]] == [2] * 12
    assert len(found["speculation"]["histogram"]) == 3
    assert json.loads(generate(*arguments, 2, "--drafter", "none").out)["speculation"]["proposed"] == 0
    assert json.loads(generate(*arguments, 0).out)["speculation"]["proposed"] == 0


def test_the_trace_has_a_line_for_each_round_then_the_text(generate, llama):
    output = expected(llama)
    lines = generate("--prompt", PROMPT, *FEW, "--trace").out.split("\n")
    rounds = 1 + output.speculation.rounds  # the first token comes with the prompt
    assert lines[0].startswith("+accepted")
    assert [line.split()[0] for line in lines[1 : rounds + 1]] == [str(i + 1) for i in range(rounds)]
    parts = [part for line in lines[1 : rounds + 1] for part in line.split("  ")]
    assert sum(part.startswith(("+", "=")) for part in parts) == 12
    assert "\n".join(lines).endswith(f"\n\n{output.text}\n")
    assert "\x1b" not in "\n".join(lines)


def test_the_trace_is_part_of_the_json_object_when_both_are_asked_for(generate):
    found = json.loads(generate("--prompt", PROMPT, *FEW, "--trace", "--json").out)
    assert len(found["trace"]) == 1 + found["speculation"]["rounds"], "the first token comes with the prompt"


@pytest.mark.parametrize("other", ["--json", "--trace"])
def test_stream_excludes_other_forms_of_output(generate, other):
    assert_refused(generate("--prompt", "a", "--stream", other), "--stream prints text as it comes")


def test_a_missing_bundle_is_refused(run, tmp_path):
    result = run("generate", "--bundle", tmp_path / "none", "--prompt", "a")
    assert_refused(result, "none is not a directory; make one with export-models")


@pytest.mark.parametrize("k", ["17", "-1"])
def test_a_draft_length_out_of_range_is_refused(generate, k):
    message = f"--draft-length is {k}, expected auto, or a whole number from 0 to 16"
    assert_refused(generate("--prompt", "a", "--draft-length", k), message)


def test_an_unknown_drafter_is_refused(generate):
    message = "--drafter is 'magic', expected one of model, common, text, lookup, suffix, ngram, random, cascade"
    assert_refused(generate("--prompt", "a", "--drafter", "magic"), message)


def test_an_empty_prompt_is_refused(generate):
    assert_refused(generate("--prompt", ""), "the prompt is empty")


def test_a_prompt_that_is_too_long_is_refused_by_how_much(generate):
    assert_refused(generate("--prompt", "a " * 200), "by ")


def test_invalid_utf8_is_refused_wherever_it_comes_from(generate, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"ab\xff")
    assert_refused(
        generate("--prompt-file", file), f"prompt file {file} is not UTF-8: byte 2 is 0xff; convert it first"
    )
    stdin(monkeypatch, b"\xc3")
    assert_refused(generate("-"), "standard input is not UTF-8: byte 0 is 0xc3; convert it first")
    assert_refused(generate("--prompt", "a\udcffb"), "--prompt is not UTF-8: byte 1 is 0xff; convert it first")


def test_an_unreadable_prompt_file_is_refused(generate, tmp_path):
    message = f"prompt file {tmp_path} cannot be read (Is a directory); give another"
    assert_refused(generate("--prompt-file", tmp_path), message)
    assert_refused(generate("--prompt-file", tmp_path / "none"), "cannot be read (No such file or directory)")


def test_exactly_one_source_of_the_prompt_is_required(generate):
    once = "the prompt has to come from one place: --prompt TEXT, --prompt-file F, or - for stdin"
    assert_refused(generate(), once)
    assert_refused(generate("--prompt", "a", "-"), once)
    assert_refused(generate("hello"), "'hello' was not expected here; a prompt follows --prompt")


def test_the_engine_is_chosen_by_its_name(generate):
    ids = [
        json.loads(generate("--prompt", PROMPT, "--json", *FEW, "--engine", name).out)["token_ids"]
        for name in ("onnxruntime", "torch")
    ]
    assert ids[0] == ids[1]
    assert_refused(generate("--prompt", PROMPT, "--engine", "magic"), "argument --engine: invalid choice: 'magic'")
    assert_refused(
        generate("--prompt", PROMPT, "--engine", "torch", "--device", "abacus"),
        "runs on the device cpu or cuda, not on 'abacus'",
    )


def test_a_lossy_result_says_so(generate):
    lenient = ("--prompt", PROMPT, *FEW, "--temperature", 1, "--seed", 1, "--lenience", 0.5)
    assert json.loads(generate("--prompt", PROMPT, *FEW, "--json").out)["lossless"] is True
    assert json.loads(generate(*lenient, "--json").out)["lossless"] is False
    result = generate(*lenient)
    assert result.code == 0
    assert result.err == "lossy: with lenience 0.5 the output is not distributed as the target's own\n"
