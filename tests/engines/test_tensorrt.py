"""The TensorRT engine without a GPU: its logic on a stand-in that keeps the rules, its calls on the real bindings."""

import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tensorrt_lean
import tensorrt_rtx
import torch
from trt_spec.engines import Bundle, EngineError, RequestError, blank_cache, make_step, open_engines
from trt_spec.engines.tensorrt import engine as tensorrt
from trt_spec.engines.tensorrt import read_plan
from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.runtime.scheduling import capture

from ..kit.bundles import Pair, export_pair, noisy_draft
from ..kit.heads import dflash_head, eagle3_head, parallel_heads
from ..kit.models import tiny_llama
from ..kit.recorder import Recorder
from ..kit.toys import Toy, with_toys
from . import fake_tensorrt
from .fake_tensorrt import FakeTensorRT, installed, write_plans

PROMPTS = ["def f(", "abc abc abc abc abc abc", "x"]


@pytest.fixture
def planned(llama: Pair, tmp_path: Path) -> Path:
    """A bundle with plans for rows of up to 4 tokens, batches of up to 3."""
    path = shutil.copytree(llama.bundle, tmp_path / "bundle")
    write_plans(path, batch=(1, 3))
    return path


@pytest.fixture
def reading_trees(llama: Pair, tmp_path: Path) -> Path:
    """A bundle whose draft has plans for all that a round proposes, at most 12 tokens."""
    path = shutil.copytree(llama.bundle, tmp_path / "reading-trees")
    write_plans(path, batch=(1, 3), draft_length=4, siblings=8, draft_trees=True, prefill_width=32)
    return path


@pytest.fixture
def library() -> Iterator[FakeTensorRT]:
    yield from installed(FakeTensorRT())


def open_decoder(path: Path, max_batch: int = 3) -> Decoder:
    return Decoder.open(path, engine="tensorrt", max_batch=max_batch, capture=False)


# Text.


@pytest.mark.parametrize("draft_length", [0, 2, 3])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=24, temperature=0),
        SamplingParams(max_new_tokens=24, temperature=1, top_p=0.9, seed=1),
        SamplingParams(max_new_tokens=24, temperature=1, rule="coupled", seed=2),
    ],
)
def test_text_is_that_of_onnx_runtime(
    planned: Path, library: FakeTensorRT, params: SamplingParams, draft_length: int
) -> None:
    with Decoder.open(planned, max_batch=3) as decoder:
        expected = decoder.generate(PROMPTS, params, draft_length=draft_length)
    with open_decoder(planned) as decoder:
        found = decoder.generate(PROMPTS, params, draft_length=draft_length)
        contexts = library.calls["create_execution_context"]
        decoder.generate(PROMPTS, params, draft_length=draft_length)
        assert library.calls["create_execution_context"] == contexts, "made once for each plan and batch"
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    widths = {width for model, width, _ in library.runs if model == "target"}
    assert widths == {4, 8}, "the verify plan and the prefill plan"
    batches = {batch for _, width, batch in library.runs if width == 4}
    assert max(batches) == 3
    assert len(batches) > 1


def test_states_of_other_kinds_give_the_text_of_onnx_runtime(
    llama: Pair, tmp_path: Path, library: FakeTensorRT
) -> None:
    """Keys and values alike, features of tokens and a summary of each row; steps are padded."""
    path = with_toys(llama, tmp_path / "toys", Toy(value_size=16))
    write_plans(path, batch=(1, 3))
    for params in (RULES["greedy"], RULES["coupled"]):
        with Decoder.open(path, max_batch=3) as decoder, open_decoder(path) as ours:
            for length in (0, 2, 3):
                expected = decoder.generate(PROMPTS, params, draft_length=length)
                found = ours.generate(PROMPTS, params, draft_length=length)
                assert [output.token_ids for output in found] == [output.token_ids for output in expected]
            assert 0.2 < ours.speculation.acceptance < 1


@pytest.mark.parametrize("drafter", ["eagle3", "dspark", "medusa"])
def test_heads_give_the_text_of_onnx_runtime(tmp_path: Path, library: FakeTensorRT, drafter: str) -> None:
    """In lines, and where plans read whole trees; the first step of a head has a plan of its own."""
    target = tiny_llama(tmp_path / "target", num_hidden_layers=1, initializer_range=0.2)
    eagle = eagle3_head(tmp_path / "eagle3", target, 48, read=(0,), eagle_aux_hidden_state_layer_ids=[0])
    medusa = parallel_heads(tmp_path / "medusa", target, "medusa")
    dspark = dflash_head(tmp_path / "dspark", target, read=(0,), aux_hidden_state_layer_ids=[0], rank=8, scale=0.3)
    path = export_pair(target, tmp_path / "bundle", [eagle, dspark, medusa]).bundle
    write_plans(path, batch=(1, 3), siblings=4, draft_trees=drafter == "eagle3", prefill_width=32)
    beside = {"eagle3": ["3+4"], "dspark": [EntropyRule(3, 3, stop_above=0.6)]}  # its doubt reads hidden states
    lengths = [1, 3, *beside.get(drafter, [])]
    for params in (RULES["greedy"], RULES["coupled"], RULES["rejection"]):
        with Decoder.open(path, max_batch=3) as decoder, open_decoder(path) as ours:
            for length in lengths:
                if params is RULES["rejection"] and isinstance(length, str):
                    continue  # whose rounds would need wider plans
                expected = decoder.generate(PROMPTS, params, draft_length=length, drafter=drafter)
                found = ours.generate(PROMPTS, params, draft_length=length, drafter=drafter)
                assert [output.token_ids for output in found] == [output.token_ids for output in expected]
            assert ours.speculation.accepted
    widths = {"eagle3": {1, 4}, "dspark": {9}, "medusa": {1}}[drafter]
    assert {width for model, width, _ in library.runs if model == drafter} >= widths


@pytest.mark.exhaustive
def test_heads_that_speak_at_once_say_what_their_plans_hold_in_rounds_that_are_longer(
    tmp_path: Path, library: FakeTensorRT
) -> None:
    """Their own requests ask for more, or a neighbour has a longer line."""
    target = tiny_llama(tmp_path / "target", num_hidden_layers=1, initializer_range=0.2)
    heads = [
        eagle3_head(tmp_path / "peagle", target, 48, read=(0,), eagle_aux_hidden_state_layer_ids=[0], mask=63),
        dflash_head(tmp_path / "dspark", target, read=(0,), aux_hidden_state_layer_ids=[0], rank=8, scale=0.3),
        parallel_heads(tmp_path / "medusa", target, "medusa"),
    ]
    path = export_pair(target, tmp_path / "bundle", heads).bundle
    write_plans(path, batch=(1, 3), draft_length=2, siblings=8, prefill_width=32)
    params = replace(RULES["greedy"], max_new_tokens=10)
    with Decoder.open(path) as decoder:
        expected = [one.token_ids for one in decoder.generate(PROMPTS, params, draft_length=0)]
    for rows in (1, 3):
        with open_decoder(path, max_batch=rows) as ours:
            for drafter in ("peagle", "dspark", "medusa"):
                asked = EntropyRule(6, 6) if drafter == "dspark" else 6
                turns = [(drafter, asked), ("lookup", 10), (f"suffix+{drafter}", 5)]
                requests = [
                    ours.submit(prompt, params, draft_length=length, drafter=name)
                    for prompt, (name, length) in zip(PROMPTS, turns, strict=True)
                ]
                while ours.step():
                    pass
                assert [one.output().token_ids for one in requests] == expected, f"{drafter} in {rows} rows"
                assert ours.by_drafter[drafter].proposed


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ({"temperature": 0}, [("model", "3+9"), ("model", "16+4"), ("model+suffix", 8)]),
        ({"rule": "coupled"}, [("model", "3+9"), ("model+suffix", 8)]),
        ({"rule": "rejection"}, [("model", "3+4")]),
    ],
)
def test_wide_plans_verify_trees_of_more_proposals_than_a_line_has(
    planned: Path, library: FakeTensorRT, tmp_path: Path, rule: dict[str, Any], settings: list[tuple[str, Any]]
) -> None:
    shutil.copytree(planned, tmp_path / "wide")
    shutil.rmtree(tmp_path / "wide" / "plans")
    write_plans(tmp_path / "wide", batch=(1, 3), draft_length=16, siblings=4, prefill_width=32)
    params = SamplingParams(**{"max_new_tokens": 24, "temperature": 1, "seed": 2} | rule)
    with Decoder.open(planned, max_batch=3) as decoder, open_decoder(tmp_path / "wide") as wide:
        for drafter, length in settings:
            expected = decoder.generate(PROMPTS, params, draft_length=length, drafter=drafter)
            library.runs.clear()
            found = wide.generate(PROMPTS, params, draft_length=length, drafter=drafter)
            assert [output.token_ids for output in found] == [output.token_ids for output in expected]
            assert 21 in {width for model, width, _ in library.runs if model == "target"}
        with pytest.raises(RequestError, match="at most 20 together"):
            wide.submit("def f(", params, draft_length="16+5", drafter="model")


RULES = {
    "greedy": SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True),
    "coupled": SamplingParams(max_new_tokens=24, temperature=1, rule="coupled", seed=2, ignore_eos=True),
    "rejection": SamplingParams(max_new_tokens=24, temperature=1, seed=2, ignore_eos=True),
}
WIDE = [("model", "3/8"), ("model", "2x2x1"), ("model", "1/2"), ("model+suffix", 4), ("cascade", 4)]


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "three"])
def test_a_draft_that_reads_trees_gives_the_text_of_onnx_runtime(
    reading_trees: Path, library: FakeTensorRT, prompts: list[str], rule: str
) -> None:
    with Decoder.open(reading_trees, max_batch=3) as decoder, open_decoder(reading_trees) as planned:
        assert planned.growing == decoder.growing == ("model",)
        for drafter, length in WIDE:
            expected = decoder.generate(prompts, RULES[rule], draft_length=length, drafter=drafter)
            library.runs.clear()
            found = planned.generate(prompts, RULES[rule], draft_length=length, drafter=drafter)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected], f"{drafter} {length}"
            assert 13 in {width for model, width, _ in library.runs if model == "draft"}, f"{drafter} {length}"
            assert planned.speculation.accepted == decoder.speculation.accepted, f"{drafter} {length}"


BESIDE = [
    [("model", "3/8"), ("cascade", 4), ("model", 2)],
    [("model", "2x2x1"), ("cascade", 3), ("lookup+random", 3)],
    [("model", "4/12"), ("model+suffix", 2), ("model", "4+2")],
    [("model", "3/5"), ("model", "1/4"), ("random+model", 4)],
]


@pytest.mark.parametrize("settings", BESIDE)
def test_padded_steps_leave_what_the_caches_hold_of_any_neighbour(
    reading_trees: Path, library: FakeTensorRT, settings: list[tuple[str, Any]]
) -> None:
    """After each round it is what a fresh reading of the committed tokens writes; texts are those without drafts."""
    params = replace(RULES["coupled"], max_new_tokens=40)
    with open_decoder(reading_trees) as decoder, Decoder.open(reading_trees) as fresh:
        expected = [one.token_ids for one in fresh.generate(PROMPTS, params, draft_length=0)]
        requests = [
            decoder.submit(prompt, params, draft_length=length, drafter=drafter)
            for prompt, (drafter, length) in zip(PROMPTS, settings, strict=True)
        ]
        off_line = 0
        while decoder.step():
            assert decoder.last_frame is not None
            verdict = decoder.last_frame.verdict
            off_line += int((verdict.last != verdict.accepted).sum())
            for ours, other in ((decoder.target, fresh.target), (decoder.draft, fresh.draft)):
                for occupant in decoder.live:
                    entries = ours.cache.entries[occupant.row]
                    tokens = torch.tensor([*occupant.request.prompt, *occupant.request.token_ids])[:entries]
                    with torch.inference_mode():
                        other.cache.free(0)
                        other.prefill([0], [tokens])
                    for name in ours.engine.contract.cache_names:
                        found, right = ours.cache.read(occupant.row, name), other.cache.read(0, name)
                        torch.testing.assert_close(found[:, :entries], right[:, :entries], atol=1e-4, rtol=1e-4)
        assert [tuple(one.token_ids) for one in requests] == expected
        assert off_line > 2


def test_the_widest_steps_of_a_draft_end_within_its_cache(reading_trees: Path, library: FakeTensorRT) -> None:
    """The stand-in refuses what lies after it: a sequence may become as long as the bundle allows."""
    length = Bundle.open(reading_trees).max_length
    prompts = [[5 + (i + row) % 7 for i in range(length - 20 - row)] for row in range(3)]
    params = [replace(RULES["coupled"], max_new_tokens=length - len(prompt)) for prompt in prompts]
    with open_decoder(reading_trees) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, params, draft_length=0)]
        for drafter, shape in WIDE:
            found = decoder.generate(prompts, params, draft_length=shape, drafter=drafter)
            assert [one.token_ids for one in found] == expected, f"{drafter} {shape}"


def test_without_plans_for_trees_a_draft_is_refused_what_needs_them_and_reads_before_the_round_what_it_lacks(
    planned: Path, library: FakeTensorRT
) -> None:
    params = RULES["greedy"]
    with open_decoder(planned) as decoder:
        for tree in ("2/3", "1x2"):
            message = (
                "drafter model can grow no tree here, where its steps give logits for 1 tokens and the target's for 4; "
                "compile its plans with trt-spec build --draft-trees; give a number, or a comb like 5+3"
            )
            with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
                decoder.submit("x", params, draft_length=tree, drafter="model")
        message = (
            "the draft model gives logits for 1 tokens a step here, drafter cascade needs as many as the target gives; "
            "compile its plans with trt-spec build --draft-trees, or use drafter model"
        )
        with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
            decoder.submit("x", params, drafter="cascade")
        expected = [one.token_ids for one in decoder.generate(PROMPTS, params, draft_length=0)]
        found = decoder.generate(PROMPTS, params, draft_length=1, drafter="suffix+model")
        assert [one.token_ids for one in found] == expected
        assert decoder.last_frame is not None
        assert decoder.last_frame.window is None
    assert {width for model, width, _ in library.runs if model == "draft"} == {2, 8}


def test_the_draft_steps_run_in_their_own_plans(planned: Path, library: FakeTensorRT) -> None:
    with open_decoder(planned) as decoder:
        decoder.generate("def f(x):", SamplingParams(max_new_tokens=8, temperature=0), draft_length=3)
    draft = [width for model, width, _ in library.runs if model == "draft" and width != 8]
    assert draft[:3] == [2, 1, 1]
    assert set(draft) == {1, 2}


def test_every_draft_runs_in_plans_of_its_own(planned: Path, library: FakeTensorRT, tmp_path: Path) -> None:
    path = noisy_draft(planned, tmp_path / "two", 0.2, seed=1, name="draft2")
    shutil.rmtree(path / "plans")
    write_plans(path, batch=(1, 3))
    params = SamplingParams(max_new_tokens=12, temperature=0)
    with open_decoder(path) as decoder:
        expected = decoder.generate(PROMPTS, params, draft_length=0)
        library.runs.clear()
        found = decoder.generate(PROMPTS, params, draft_length=3, drafter="model2")
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert {model for model, _, _ in library.runs} == {"target", "draft2"}


@pytest.mark.parametrize("drafter", ["common", "text"])
def test_a_draft_with_tokens_of_its_own_reads_each_round_first_in_its_own_plan(
    merging: Pair, tmp_path: Path, library: FakeTensorRT, drafter: str
) -> None:
    path = shutil.copytree(merging.bundle, tmp_path / "bundle")
    write_plans(path, batch=(1, 3), prefill_width=32)
    expected = []
    for engine in ("onnxruntime", "tensorrt"):
        with Decoder.open(path, engine, max_batch=3, capture=False) as decoder:
            outputs = decoder.generate(PROMPTS, RULES["coupled"], draft_length=3, drafter=drafter)
            expected.append([one.token_ids for one in outputs])
    assert expected[0] == expected[1]
    widths = [width for model, width, _ in library.runs if model == "foreign"]
    assert set(widths) == {8, 1, 32}
    assert widths.count(32) < len(PROMPTS) < widths.count(8), "what it lacks fits into its first step"


def test_a_step_that_is_widened_runs_a_tree_and_continues_the_line_behind_it(
    planned: Path, library: FakeTensorRT
) -> None:
    """From the first entry of an empty cache on: what is added after the step sees only what is there."""
    graph, contract = Bundle.open(planned).graph("target"), Bundle.open(planned).target.contract
    tokens, logits = torch.tensor([[5, 6, 7]]), []
    ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    places = {"depths": torch.tensor([[0, 1, 1]]), "ancestors": ancestors}
    for name, capacity in (("onnxruntime", 64), ("tensorrt", Bundle.open(planned).capacity)):
        [engine] = open_engines(name, [(graph, contract)], "cpu", exact_weights=True)
        cache = blank_cache(contract, 1, capacity)
        for given in ({}, places):
            found = torch.zeros(1, 3, contract.vocab_size)
            inputs = {"input_ids": tokens, "start": torch.zeros(1, dtype=torch.int64), **given}
            make_step(engine, cache, inputs, {"logits": found}).run()
            logits.append(found)
        engine.close()
    assert library.runs == [("target", 4, 1)] * 2
    torch.testing.assert_close(logits[2:], logits[:2], atol=1e-5, rtol=0)
    assert not torch.equal(logits[0], logits[1])


def test_what_is_bound_stays_bound(planned: Path, library: FakeTensorRT) -> None:
    with open_decoder(planned, max_batch=1) as decoder:
        request = decoder.submit("def f(", SamplingParams(max_new_tokens=40, temperature=0), draft_length=3)
        for _ in range(4):
            decoder.step()
        library.calls.clear()
        rounds = request.speculation.rounds
        for _ in range(3):
            decoder.step()
        rounds = request.speculation.rounds - rounds
    assert rounds == 3
    assert library.calls["set_input_shape"] == 0
    # The draft's one-token steps take turns in one context: their tokens and starts differ, nothing else does.
    assert 0 < library.calls["set_tensor_address"] <= 2 * 2 * rounds


def test_a_prompt_is_read_without_a_prefill_plan(llama: Pair, tmp_path: Path, library: FakeTensorRT) -> None:
    path = shutil.copytree(llama.bundle, tmp_path / "bundle")
    write_plans(path, prefill_width=0)
    params = SamplingParams(max_new_tokens=8, temperature=0)
    with Decoder.open(path) as decoder:
        [expected] = decoder.generate("abc " * 9, params, draft_length=2)
    with open_decoder(path) as decoder:
        [found] = decoder.generate("abc " * 9, params, draft_length=2)
    assert found.token_ids == expected.token_ids


def test_of_plans_for_one_shape_one_is_opened(planned: Path, library: FakeTensorRT) -> None:
    """Fused if there is such a one, and for all batches that are asked for."""
    write_plans(planned, batch=(1, 1))
    write_plans(planned, batch=(1, 3), unfused_attention=True)
    assert len(list(planned.glob("plans/*/*.plan"))) == 5 + 3 + 5
    with open_decoder(planned) as decoder:
        keys = [plan.key for plan in (*decoder.target.engine._plans, *decoder.draft.engine._plans)]
    assert {key.unfused_attention for key in keys} == {False}
    assert sorted(key.batch for key in keys) == [(1, 1), (1, 1), (1, 3), (1, 3), (1, 3)]


def test_plans_that_do_not_cover_one_another_are_all_used(llama: Pair, tmp_path: Path, library: FakeTensorRT) -> None:
    path = shutil.copytree(llama.bundle, tmp_path / "bundle")
    write_plans(path, batch=(1, 2), draft_length=4)
    write_plans(path, batch=(1, 3), draft_length=2)
    with open_decoder(path, max_batch=2) as decoder:
        assert decoder.target.engine.verify_width == 5
    with open_decoder(path, max_batch=3) as decoder:
        assert decoder.target.engine.verify_width == 3, "what every batch can"
        with pytest.raises(RequestError, match="from 0 to 2, the most"):
            decoder.submit("x", draft_length=3)


def test_both_models_run_in_the_library_of_the_target(planned: Path, library: FakeTensorRT) -> None:
    for sidecar in planned.glob("plans/*/draft-*.json"):
        rewrite(planned, sidecar, engine="tensorrt")
    with pytest.raises(EngineError, match=r"has no plans for its draft; compile them: .* --engine tensorrt-rtx"):
        open_decoder(planned)


# What does not fit is refused.


def test_a_request_wider_than_the_plans_is_refused_when_it_is_submitted(planned: Path, library: FakeTensorRT) -> None:
    with open_decoder(planned) as decoder:
        with pytest.raises(RequestError, match="from 0 to 3, the most that a plan was compiled for"):
            decoder.submit("x", draft_length=4)
        request = decoder.submit("x", draft_length=3)
        with pytest.raises(RequestError, match="from 0 to 3"):
            request.draft(4, request.drafter)
        decoder.cancel(request)


def test_more_rows_than_the_plans_have_are_refused_when_the_decoder_is_opened(
    planned: Path, library: FakeTensorRT
) -> None:
    with pytest.raises(EngineError, match=r"no plan of target runs 4 rows .*; compile one with .* --batch 1..4"):
        open_decoder(planned, max_batch=4)


def test_plans_without_a_batch_of_one_are_refused(llama: Pair, tmp_path: Path, library: FakeTensorRT) -> None:
    path = shutil.copytree(llama.bundle, tmp_path / "bundle")
    write_plans(path, batch=(2, 3), prefill_width=0)
    with pytest.raises(EngineError, match=r"no plan of target runs 1 rows .* --batch 1..1"):
        open_decoder(path)


def change_keys(path: Path, **fields: Any) -> None:
    """The plans as if they had been compiled under other circumstances."""
    for sidecar in path.glob("plans/*/*.json"):
        rewrite(path, sidecar, **fields)


def rewrite(path: Path, sidecar: Path, **fields: Any) -> None:
    plan = read_plan(sidecar)
    plan = replace(plan, key=replace(plan.key, **fields))
    file = path / plan.key.path
    file.parent.mkdir(exist_ok=True)
    sidecar.with_suffix(".plan").rename(file)
    sidecar.unlink()
    file.with_suffix(".json").write_text(plan.to_json())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"graph": "0"}, r"are from another export of its target; compile them again: trt-spec build --bundle"),
        (
            {"compute_capability": "12.0"},
            r"for GPUs of compute capability 12.0, the one here has 8.9; compile",
        ),
        (
            {"version": "0.9"},
            r"compiled by tensorrt-rtx 0.9, but 1 is installed; compile them again: trt-spec build --bundle",
        ),
        (
            {"model": "other"},
            r"has no plans for its target; compile them: trt-spec build --bundle \S+ --engine tensorrt",
        ),
        ({"engine": "tensorrt"}, r"need tensorrt, which is not installed; pip install 'trt-spec\[tensorrt\]'"),
        ({"capacity": 64}, r"is for caches of 64 tokens, this one has \d+; compile it again with trt-spec build"),
    ],
)
def test_plans_that_do_not_fit_are_refused_with_what_mends_it(
    planned: Path, library: FakeTensorRT, fields: dict[str, Any], said: str
) -> None:
    change_keys(planned, **fields)
    with patch.dict(sys.modules, {"tensorrt": None}), pytest.raises(EngineError, match=said):
        open_decoder(planned)


def test_a_missing_damaged_or_unreadable_plan_is_refused(planned: Path, library: FakeTensorRT) -> None:
    [file] = planned.glob("plans/*/target-4-*.plan")
    content = file.read_bytes()
    file.write_bytes(b"?" * len(content))
    with pytest.raises(EngineError, match=r"target-4-\S+ is damaged; delete it and compile it again"):
        open_decoder(planned)
    sidecar = json.loads(file.with_suffix(".json").read_text())
    sidecar["sha256"] = fake_tensorrt.sha256(file.read_bytes()).hexdigest()
    file.with_suffix(".json").write_text(json.dumps(sidecar))
    with pytest.raises(
        EngineError, match=r"cannot open \S+, which takes \d+ MiB: the plan has a bad magic tag; compile"
    ):
        open_decoder(planned)
    file.unlink()
    with pytest.raises(EngineError, match="does not describe a plan"):
        open_decoder(planned)


def test_an_output_in_other_memory_than_promised_is_refused(planned: Path, library: FakeTensorRT) -> None:
    with (
        patch.object(fake_tensorrt.ICudaEngine, "get_aliased_input_tensor", lambda self, name: "past_key_1"),
        pytest.raises(EngineError, match="present_key_0 in the memory of 'past_key_1', expected 'past_key_0'"),
    ):
        open_decoder(planned)


def test_no_memory_is_said_with_what_is_needed(planned: Path, library: FakeTensorRT) -> None:
    with (
        patch.object(fake_tensorrt.ICudaEngine, "device_memory_size_v2", 2**60),
        pytest.raises(EngineError, match=r"no memory for a workspace of 1,099,511,627,776 MiB beside plans of \d+ MiB"),
    ):
        open_decoder(planned)
    with (
        patch.object(fake_tensorrt.ICudaEngine, "create_execution_context", lambda self, settings: None),
        pytest.raises(EngineError, match=r"cannot run: no reason given; make room on the GPU"),
        open_decoder(planned) as decoder,
    ):
        decoder.generate("x", SamplingParams(max_new_tokens=2))


@pytest.mark.parametrize(
    "rule",
    ["set_device_memory", "set_input_shape", "set_tensor_address"],
)
def test_a_call_that_is_left_out_is_noticed_by_the_stand_in(planned: Path, library: FakeTensorRT, rule: str) -> None:
    """Else it would prove nothing."""
    with (
        patch.object(fake_tensorrt.IExecutionContext, rule, lambda self, *_: True),
        pytest.raises(EngineError, match=r"failed at batch 1, width \d: (no memory|the shape|the address)"),
        open_decoder(planned) as decoder,
    ):
        decoder.generate("def f(", SamplingParams(max_new_tokens=4))


def test_tokens_that_see_nothing_are_noticed_by_the_stand_in(planned: Path, library: FakeTensorRT) -> None:
    with (
        patch.object(tensorrt, "line", lambda *_: {}),  # so what is added after a step is all zero
        pytest.raises(EngineError, match="a token sees nothing, not even itself"),
        open_decoder(planned) as decoder,
    ):
        decoder.generate("def f(", SamplingParams(max_new_tokens=4))


def test_tokens_behind_the_cache_are_noticed_by_the_stand_in(planned: Path, library: FakeTensorRT) -> None:
    """Those that a step is padded with, too."""
    bundle = Bundle.open(planned)
    contract, capacity = bundle.target.contract, bundle.capacity
    [engine] = open_engines("tensorrt", [(bundle.graph("target"), contract)], "cpu", exact_weights=True)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "start": torch.tensor([capacity - 4])}
    logits = torch.zeros(1, 3, contract.vocab_size)
    step = make_step(engine, blank_cache(contract, 1, capacity), inputs, {"logits": logits})
    step.run()
    step.start.add_(1)
    with pytest.raises(EngineError, match="a token lies behind the cache"):
        step.run()
    engine.close()


def test_another_stream_or_a_cache_that_is_written_elsewhere_is_noticed(planned: Path, library: FakeTensorRT) -> None:
    bind = fake_tensorrt.IExecutionContext.set_tensor_address

    def apart(self: Any, name: str, memory: int) -> bool:
        return bind(self, name, memory + fake_tensorrt.ALIGNMENT * (name == "present_key_0"))

    for broken in (
        patch.object(fake_tensorrt.IExecutionContext, "set_tensor_address", apart),
        patch.object(tensorrt, "current_stream", lambda device: 0),
    ):
        with broken, pytest.raises(EngineError, match=r"does not lie where|another stream"), open_decoder(planned) as d:
            d.generate("def f(", SamplingParams(max_new_tokens=4))


def test_a_failing_run_leaves_a_decoder_that_works(planned: Path, library: FakeTensorRT) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=0)
    with open_decoder(planned) as decoder:
        [expected] = decoder.generate("def f(", params)
        with (
            patch.object(fake_tensorrt.IExecutionContext, "execute_async_v3", lambda self, stream: False),
            pytest.raises(EngineError, match="tensorrt-rtx failed"),
        ):
            decoder.generate("def f(", params)
        [again] = decoder.generate("def f(", params)
    assert again.token_ids == expected.token_ids


# The two libraries.


def test_the_runtime_cache_is_kept_beside_its_plan(planned: Path, library: FakeTensorRT) -> None:
    open_decoder(planned).close()
    caches = sorted(planned.glob("plans/*/*.cache"))
    assert [cache.with_suffix(".plan").exists() for cache in caches] == [True] * 5
    assert {cache.read_bytes() for cache in caches} == {b"kernels"}
    caches[0].write_bytes(b"of another driver")
    open_decoder(planned).close()
    assert library.rejected_caches == 1
    assert caches[0].read_bytes() == b"kernels"
    Bundle.open(planned)


def test_a_runtime_cache_that_cannot_be_kept_is_said(planned: Path, library: FakeTensorRT) -> None:
    decoder = open_decoder(planned)
    for plan in planned.glob("plans/*/*.plan"):
        plan.with_suffix(".cache").mkdir()
    with pytest.warns(UserWarning, match="cannot be saved: Is a directory"):
        decoder.close()


def test_the_library_without_runtime_caches_runs_the_same_code(planned: Path) -> None:
    for library in installed(FakeTensorRT(has_runtime_cache=False)):
        with open_decoder(planned) as decoder:
            decoder.generate("def f(", SamplingParams(max_new_tokens=4))
            assert decoder.target.engine.capturable()
        assert library.runs
    assert not list(planned.glob("plans/*/*.cache"))


def test_capture_is_asked_of_what_has_run(planned: Path, library: FakeTensorRT) -> None:
    with open_decoder(planned) as decoder:
        decoder.generate("def f(", SamplingParams(max_new_tokens=4))
        assert decoder.target.engine.capturable()
        assert decoder.draft.engine.capturable()
        with patch.object(tensorrt, "current_stream", lambda device: library.stream + 1):
            assert not decoder.target.engine.capturable()


@pytest.mark.parametrize(("drafter", "length"), [("model", 3), ("model", "3/8"), ("model+suffix", 4), ("cascade", 4)])
def test_recorded_rounds_write_the_same_text_and_their_shapes_never_change(
    reading_trees: Path, library: FakeTensorRT, drafter: str, length: Any
) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=1, rule="coupled", seed=5)

    def run(decoder: Decoder) -> list[tuple[int, ...]]:
        decoder.forget_outputs()
        return [one.token_ids for one in decoder.generate(PROMPTS, params, draft_length=length, drafter=drafter)]

    with open_decoder(reading_trees) as decoder:
        expected = run(decoder)
    recorder = Recorder()
    with (
        patch.object(capture, "Record", recorder),
        patch.object(capture, "new_pool", lambda: "pool"),
        Decoder.open(reading_trees, engine="tensorrt", max_batch=3) as decoder,
    ):
        found = run(decoder)
        shapes = library.calls["set_input_shape"]
        assert run(decoder) == expected
        assert library.calls["set_input_shape"] == shapes
    assert found == expected
    assert sum(recorder.launched) > 10


ONLY_RTX = {"create_runtime_cache", "set_runtime_cache", "is_stream_capturable", "IRuntimeCache"}


@pytest.mark.parametrize("real", [tensorrt_rtx, tensorrt_lean], ids=lambda module: module.__name__)
def test_every_call_exists_in_the_real_bindings_with_these_parameters(real: Any) -> None:
    """The stand-in has exactly the calls that the engine makes, for all else would have failed above."""
    checked = 0
    for stand_in in (
        fake_tensorrt.Runtime,
        fake_tensorrt.ICudaEngine,
        fake_tensorrt.IRuntimeConfigRTX,
        fake_tensorrt.IRuntimeCache,
        fake_tensorrt.IExecutionContextRTX,
    ):
        name = stand_in.__name__.removesuffix("RTX")
        if real is tensorrt_lean and name in ONLY_RTX:
            assert not hasattr(real, name)
            continue
        for method, function in inspect.getmembers(stand_in, inspect.isfunction):
            if method.startswith("_"):
                continue
            if real is tensorrt_lean and method in ONLY_RTX:
                assert not hasattr(getattr(real, name), method), "the engine decides by what is there"
                continue
            given = list(inspect.signature(function).parameters)[1:]
            assert given in signatures(getattr(getattr(real, name), method)), f"{name}.{method}"
            checked += 1
    if real is tensorrt_rtx:
        assert "EAGER" in real.DynamicShapesKernelSpecializationStrategy.__members__
        assert hasattr(real.IRuntimeConfig, "dynamic_shapes_kernel_specialization_strategy")
    assert checked == (15 if real is tensorrt_rtx else 10)
    assert isinstance(real.ICudaEngine.device_memory_size_v2, property)
    assert {"INTERNAL_ERROR", "ERROR"} <= set(dir(real.ILogger))
    assert "USER_MANAGED" in real.ExecutionContextAllocationStrategy.__members__
    assert real.__version__


def signatures(method: Any) -> list[list[str]]:
    """The parameters of each overload, by the docstring that the bindings generate."""
    found = re.findall(rf"{method.__name__}\(self: [^,)]*,? ?(.*)\) -> ", method.__doc__)
    return [re.findall(r"(?:^|, )(\w+): ", arguments) for arguments in found]


def test_the_real_library_says_in_one_sentence_that_there_is_no_gpu(planned: Path) -> None:
    change_keys(planned, version=tensorrt_rtx.__version__)
    with (
        patch.object(tensorrt, "compute_capability", lambda device: "8.9"),
        pytest.raises(EngineError, match=r"tensorrt-rtx \S+ cannot open \S+, which takes \d+ MiB: \S+") as refused,
    ):
        open_decoder(planned)
    assert "\n" not in str(refused.value)


def test_without_a_gpu_the_engine_says_so(planned: Path) -> None:
    bundle = Bundle.open(planned)
    target = bundle.graph("target"), bundle.target.contract
    with pytest.raises(EngineError, match="engine tensorrt runs on the device cuda, not on 'cpu'"):
        open_engines("tensorrt", [target], "cpu")
    with (
        patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(EngineError, match="engine tensorrt needs a GPU, and torch sees none; trt-spec doctor says"),
    ):
        open_engines("tensorrt", [target], "cuda")


def test_steps_are_of_the_plan_and_their_sidecars_say_which(planned: Path, library: FakeTensorRT) -> None:
    bundle = Bundle.open(planned)
    [engine] = open_engines("tensorrt", [(bundle.graph("target"), bundle.target.contract)])
    assert (engine.static_capacity, engine.verify_width, engine.prefill_widths(19)) == (True, 4, [8, 8, 3])
    assert {read_plan(file).role for file in planned.glob("plans/*/target-*.json")} == {"verify", "prefill"}
    engine.close()
