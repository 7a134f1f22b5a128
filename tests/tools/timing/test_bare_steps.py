"""A recorded decoder's costs are those of recorded steps: by a clock that steps alone advance, without a GPU."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trt_spec.engines import ENGINES, Bundle, Step
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.engines.torch import TorchEngine
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.lengths.costs import read_costs
from trt_spec.runtime.scheduling import capture
from trt_spec.tools.in_words import on_device
from trt_spec.tools.measuring import bench as bench_command
from trt_spec.tools.measuring import fastest_engine
from trt_spec.tools.measuring.fastest_engine import fastest_engines
from trt_spec.tools.timing import bare_steps, clock
from trt_spec.tools.timing.time_rounds import Measured, Setting, measure

from ...kit.bundles import Pair
from ...kit.recorder import Recorded, Recorder

PIECE_BY_PIECE = 10.0  # seconds of a step that the host launches
REPLAYED = {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.5}  # by width, where a record is replayed


class SlowHost:
    """Engines whose steps take their time by the clock: much where they are launched piece by piece."""

    def __init__(self) -> None:
        self.now, self.replaying = 0.0, False

    def slowed(self, step: Step) -> Step:
        def run() -> None:
            step.run()
            self.now += REPLAYED.get(step.input_ids.shape[1], 3.0) if self.replaying else PIECE_BY_PIECE

        return replace(step, run=run)


@pytest.fixture
def host() -> Iterator[SlowHost]:
    host, launch = SlowHost(), Recorded.launch

    def launched(record: Recorded) -> None:
        host.replaying = True
        launch(record)
        host.replaying = False

    def timed(make):
        return lambda engine, inputs, outputs: host.slowed(make(engine, inputs, outputs))

    measuring = clock.CLOCK.set(lambda: host.now)
    with (
        patch.object(capture, "Record", Recorder()),
        patch.object(capture, "new_pool", lambda: "pool"),
        patch.object(Recorded, "launch", launched),
        patch.object(TorchEngine, "step", timed(TorchEngine.step)),
        patch.object(TorchEngine, "capturable", lambda engine: True),
        patch.object(OnnxRuntimeEngine, "step", timed(OnnxRuntimeEngine.step)),
    ):
        yield host
    clock.CLOCK.reset(measuring)


def measured(pair: Pair, *, engine: str = "torch", capture: bool = True) -> Measured:
    found = Measured(Setting(3, "model"))
    params = [SamplingParams(max_new_tokens=48, temperature=0, ignore_eos=True)]
    with Decoder.open(pair.bundle, engine, max_batch=1, capture=capture) as decoder:
        measure(decoder, ["def main"], params, found)
    return found


def test_bare_steps_are_replayed_where_rounds_are(llama: Pair, host: SlowHost) -> None:
    found = measured(llama)
    assert {tuple(ms) for ms in found.bare.first_draft.values()} == {(1500.0,) * len(found.bare.verify)}
    assert set(found.bare.draft["model"]) == {1000.0}
    assert set(found.bare.verify) == {2500.0}
    assert found.round_overhead == pytest.approx(1.0)


def test_only_replayed_rounds_tell_what_rounds_cost(llama: Pair, host: SlowHost) -> None:
    found = measured(llama)
    as_they_are = [one.ms for one in found.rounds if not one.replayed]
    assert as_they_are
    assert min(as_they_are) >= 4 * 1e3 * PIECE_BY_PIECE
    assert max(found.round_ms) <= 2 * 6000.0, "the first also launches the next"
    assert len(found.round_ms) == len(found.parts_ms) == len(found.rounds) - len(as_they_are)


@pytest.mark.parametrize(("engine", "captures"), [("torch", False), ("onnxruntime", True)])
def test_bare_steps_run_as_they_are_where_rounds_do(llama: Pair, host: SlowHost, engine: str, captures: bool) -> None:
    """Because the decoder was told so, or because the engine cannot be recorded."""
    found = measured(llama, engine=engine, capture=captures)
    assert set(found.bare.verify) == set(found.bare.draft["model"]) == {1e3 * PIECE_BY_PIECE}
    assert found.round_overhead == pytest.approx(1.0)
    assert not any(one.replayed for one in found.rounds)


def test_bench_and_the_table_of_costs_tell_of_replayed_steps(llama: Pair, host: SlowHost, run, tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main\n")
    few = ("--engine", "torch", "--prompts", prompts, "--max-new-tokens", 32, "--repeats", 1, "--draft-lengths", 3)
    with patch.object(bench_command, "read_bandwidth", lambda device: 1e9):
        result = run("bench", "--bundle", llama.bundle, *few, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    plain, drafted = found["settings"]
    assert found["roof"]["bare_ms"] == plain["verify_ms"] == 1000.0
    assert (drafted["draft_ms"], drafted["verify_ms"]) == (3500.0, 2500.0)
    assert [one["round_overhead"] for one in found["settings"]] == pytest.approx([1.0, 1.0])
    assert drafted["predicted"] == pytest.approx(drafted["tokens_per_round"] / 6.0, rel=0.3), (
        "of the acceptance that was seen, over c · K + v = 6"
    )
    for one in found["settings"]:
        assert 0.5 < one["on_device"]["replayed_share"] <= 1
        assert one["on_device"]["kernels_per_round"] is None
    assert found["recorded_kinds"] >= 2
    told = [on_device(one["draft_length"], one) for one in found["settings"]]
    assert "% of rounds replayed, " in told[0]
    bundle = Bundle.open(llama.bundle)
    try:
        assert run("tune", llama.bundle, *few, "--batches", 1).code == 0
        costs = read_costs(bundle, "torch", "cpu")
        assert costs is not None
        assert costs.round_ms["model"] == ((1000.0, 6000.0),)
    finally:
        for file in (llama.bundle / "costs").glob("*"):
            file.unlink()
        (llama.bundle / "costs").rmdir()


def test_engine_auto_compares_engines_as_their_steps_will_run(llama: Pair, host: SlowHost) -> None:
    two = {name: ENGINES[name] for name in ("onnxruntime", "torch")}
    with patch.dict(REPLAYED, {1: 1.0, 3: 1.0, 5: 1.0}), patch.object(fastest_engine, "ENGINES", two):
        fastest, times = fastest_engines(Bundle.open(llama.bundle), "cpu", (1,), lambda text: None)
    assert fastest == {1: "torch"}
    for by_engine in times.values():
        assert by_engine["torch"] == pytest.approx({1: 1000.0})
        assert by_engine["onnxruntime"] == pytest.approx({1: 1e3 * PIECE_BY_PIECE})


@pytest.mark.parametrize("has_compiler", [True, False])
def test_engine_auto_weighs_compiled_steps_where_they_can_be_compiled(llama: Pair, has_compiler: bool) -> None:
    """With the operations of a region in place of its code."""

    def compiled(module: Any, *_: Any, **__: Any) -> Any:
        if not has_compiler:
            raise RuntimeError("no compiler found")
        return module

    said: list[str] = []
    two = {name: ENGINES[name] for name in ("onnxruntime", "torch-compiled")}
    with (
        patch.object(torch._inductor, "standalone_compile", compiled),
        patch.object(fastest_engine, "ENGINES", two),
        patch.object(fastest_engine, "LEFT_OUT", set()),
    ):
        fastest, times = fastest_engines(Bundle.open(llama.bundle), "cpu", (1,), said.append)
    told = [line for line in said if "left out" in line]
    if has_compiler:
        assert not told
        assert all(set(by_engine) == set(two) for by_engine in times.values())
    else:
        assert told == ["torch-compiled is left out: torch failed at batch 1, width 1: no compiler found"] * 2
        assert fastest == {1: "onnxruntime"}


def test_a_short_step_is_replayed_often_enough_to_be_timed(host: SlowHost, llama: Pair) -> None:
    """What launching and waiting takes is shared by many replays."""
    recorder = capture.Record
    host.now = 0.0
    step = Step({}, {}, lambda: setattr(host, "now", host.now + 0.0004))
    steps = bare_steps.BareSteps("cpu", recorded=True)
    assert steps.ms(step) == pytest.approx(0.4)
    assert recorder.launched == [1 + 1 + 8], "to bring it to the device, to see how long it takes, to time it"
    assert steps.ms(step) == pytest.approx(0.4)
    assert recorder.launched == [10 + 8], "the same record"
