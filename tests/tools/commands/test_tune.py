"""What `trt-spec tune` measures is what it prints and keeps, and what the draft length is chosen by from then on."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
from trt_spec.engines import Bundle, blank_step, engines_of
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.lengths.costs import read_costs
from trt_spec.runtime.scheduling.engine_choice import read_choice
from trt_spec.tools.certificate.arbiter import first_difference
from trt_spec.tools.commands import tune as tune_command
from trt_spec.tools.measuring import fastest_engine
from trt_spec.tools.measuring.fastest_engine import _choose, fastest_engines
from trt_spec.tools.measuring.tune_result import BUSY, _oracle, _spread, report
from trt_spec.tools.timing import clock
from trt_spec.tools.timing.time_rounds import Measured, Setting, TimedRound, measure

from ...kit.bundles import export_pair
from ...kit.heads import eagle3_head, look_aheads, parallel_heads
from ..conftest import assert_refused

TIMED = ("onnxruntime", "openvino", "torch")


@pytest.fixture
def bundle(llama, tmp_path):
    shutil.copytree(llama.bundle, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def tune(run, bundle):
    few = ("--max-new-tokens", 24, "--repeats", 1, "--draft-lengths", "1,4", "--batches", "2,1")
    return lambda *arguments: run("tune", bundle, *few, *arguments)


def test_the_table_is_kept_printed_and_makes_auto_the_default(tune, run, bundle, tmp_path):
    result = tune("--json", tmp_path / "out.json")
    assert result.code == 0
    found = json.loads(result.out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert (found["engines"], found["other_engines"]) == ({"2": "onnxruntime"}, [])
    shapes = [one for one in found["settings"] if not one["shape"].isdecimal()]
    found["settings"] = [one for one in found["settings"] if one["shape"].isdecimal()]
    seen = [(one["drafter"], one["batch"], one["draft_length"]) for one in found["settings"]]
    drafters = {"model", "lookup", "suffix", "ngram", "cascade"}
    assert len(seen) == len(set(seen)) == 2 * (1 + 2 * (len(drafters) - 1) + 1), "suffix at one length"
    for one in found["settings"]:
        assert one["host_ms"] == pytest.approx(one["round_ms"] - one["draft_ms"] - one["verify_ms"])
    costs = read_costs(Bundle.open(bundle), "onnxruntime", "cpu")
    assert costs is not None
    assert (costs.batches, costs.draft_lengths, set(costs.round_ms)) == ((1, 2), (0, 1, 4), drafters)
    for one in found["settings"]:
        if one["draft_length"]:
            table = costs.round_ms[one["drafter"]]
            place = costs.batches.index(one["batch"]), costs.draft_lengths.index(one["draft_length"])
            assert table[place[0]][place[1]] == one["round_ms"] or one["drafter"] == "suffix"
    assert costs.round_ms["suffix"] == costs.round_ms["lookup"], "where it proposes"
    assert costs.round_ms["model"][0][0] == costs.round_ms["lookup"][0][0], "K = 0 is one measurement"
    assert {(one["drafter"], one["batch"], one["draft_length"]) for one in shapes} == {("model", 1, 4), ("model", 2, 4)}
    assert costs.beside == (1, 2, 4, 8, "4/8", "4/16"), "trees beside a line that was measured"
    assert set(costs.beside_ms) == set(costs.beside_tokens) == {"model"}
    for one in shapes:
        line = costs.round_ms["model"][costs.batches.index(one["batch"])][2]
        shape = int(one["shape"][2:]) if one["shape"].startswith("4+") else one["shape"]
        added = costs.beside_ms["model"][costs.batches.index(one["batch"])][costs.beside.index(shape)]
        assert added == max(0.0, one["round_ms"] - line)
    few, trees = costs.beside_tokens["model"][:4], costs.beside_tokens["model"][4:]
    assert 0 < max(few) <= 1
    assert 0 < max(trees) <= 4
    assert set(costs.reading_ms) == {"model", "cascade"}, "those that run a draft model"
    assert all(sum(parts) > 0 for parts in costs.reading_ms.values())
    assert result.out.count("its draft reads a prompt in ") == 2
    assert "where its line is rejected, tokens accepted beside it: +1: 0." in result.out
    for advice in found["drafters"]:
        assert advice["acceptance"] == costs.acceptance[advice["drafter"]]
        assert 1 <= len(advice["acceptance_by_position"]) <= 4
        assert f"{advice['acceptance_by_position'][0]:.0%}" in result.out
        for row in advice["batches"]:
            assert row["oracle_speed_up"] >= 1 - 1e-9
            assert (row["best_draft_length"] == 0) == (row["speed_up"] == 1)
    lines = result.out.splitlines()
    assert lines[0] == "engine onnxruntime"
    assert lines[1].split()[:3] == ["drafter", "batch", "K"]
    assert lines[2].split()[:3] == ["none", "2", "0"] or lines[2].split()[:3] == ["none", "1", "0"]
    assert "draft length auto is the default from now on" in lines[-2]
    texts = []
    for options in ((), ("--draft-length", 0), ("--drafter", "mixed")):
        again = run("generate", "--bundle", bundle, "--prompt", "def f(", "--max-new-tokens", 30, *options)
        assert again.code == 0
        texts.append(again.out)
    assert first_difference(texts[0], texts[1]) is None
    assert first_difference(texts[2], texts[1]) is None
    with Decoder.open(bundle) as decoder:
        assert decoder.submit("def f(").draft_length == "auto"


def test_quick_measures_one_batch_where_the_clock_leaves_no_time_for_more(run, bundle, monkeypatch):
    monkeypatch.setattr("trt_spec.tools.flags.pace.QUICK_SECONDS", 0.0)
    result = run("tune", bundle, "--quick")
    assert "quick: draft lengths 0, 2, 4, batches 1 and 2, 16 tokens, once, and no combs or trees, or" in result.err
    assert "quick: there is time for batch 1 alone\n" in result.err
    assert {one["batch"] for one in json.loads(result.out.splitlines()[-1])["settings"]} == {1}
    assert (costs := read_costs(Bundle.open(bundle), "onnxruntime", "cpu")) is not None
    assert costs.batches == (1,)


def test_a_machine_that_was_busy_is_told_by_the_spread_of_equal_rounds(tune):
    def rounds(*times):
        return Measured(Setting(1, "model"), rounds=[TimedRound(ms, [], replayed=False) for ms in times])

    quiet = rounds(*[1.0, 1.02, 1.04] * 5, 9.0)
    busy = rounds(1.0, 3.0, 1.0, 3.0, 2.0)
    once = rounds(1.0)
    assert _spread([once]) == 0 < BUSY < _spread([busy, once])
    assert _spread([quiet, quiet, busy]) == _spread([quiet])
    found = json.loads(tune().out.splitlines()[-1])
    assert found["spread"] > 0
    assert "as on a busy machine" not in report(found | {"spread": BUSY})
    assert "took times 50% apart, as on a busy machine: tune again" in report(found | {"spread": 0.5})


def test_further_drafts_are_measured_if_that_is_asked_for(run, drafts, tmp_path):
    bundle = shutil.copytree(drafts.bundle, tmp_path / "bundle")
    few = ("--max-new-tokens", 8, "--repeats", 1, "--draft-lengths", "1", "--batches", "1")
    for flags, measured in (((), False), (("--all-drafts",), True)):
        assert run("tune", bundle, *few, *flags).code == 0
        costs = read_costs(Bundle.open(bundle), "onnxruntime", "cpu")
        assert ("model2" in costs.round_ms) == measured
        with Decoder.open(bundle) as decoder:
            request = decoder.submit("def f(", SamplingParams(max_new_tokens=30), drafter="model2")
            assert (request.draft_length == "auto") == measured
            while decoder.step():
                pass


def test_heads_are_measured_and_their_lengths_chosen(run, llama, tmp_path):
    target, eagle3, medusa = llama.checkpoint, tmp_path / "eagle3", tmp_path / "medusa"
    heads = [eagle3_head(eagle3, target, read=(0, 1)), parallel_heads(medusa, target, "medusa")]
    heads.append(look_aheads(tmp_path / "pass", target))
    bundle = export_pair(target, tmp_path / "bundle", heads).bundle
    (tmp_path / "prompts").write_text("def f(a, b):\n")
    few = ("--max-new-tokens", 8, "--repeats", 1, "--draft-lengths", "1,2", "--prompts", tmp_path / "prompts")
    assert run("tune", bundle, *few, "--batches", "1").code == 0
    costs = read_costs(Bundle.open(bundle), "onnxruntime", "cpu")
    assert {"eagle3", "medusa", "pass", "lookup"} <= set(costs.round_ms)
    assert min(*costs.reading_ms["eagle3"]) >= 0 < max(costs.reading_ms["eagle3"]), "it reads what it has missed"
    assert costs.reading_ms["medusa"] == (0, 0), "it keeps nothing"
    with Decoder.open(bundle) as decoder:
        assert decoder.submit("def f(").draft_length == "auto"
    result = run("bench", "--bundle", bundle, "--all-drafters", *few, "--json")
    found = json.loads(result.out)
    assert found["drafter"] == "eagle3"
    assert {"medusa", "pass", "suffix"} <= {setting["drafter"] for setting in found["drafters"]}


def test_the_oracle_is_never_worse_than_the_best_fixed_length():
    times = [1.0, 1.2, 1.4, 1.6, 1.8]
    assert _oracle(0.0, 1.0, times) == _oracle(0.9, 0.0, times) == 1.0
    assert _oracle(0.9, 1.0, [1.0, 3.0, 9.0]) == 1.0, "where no length pays, it proposes nothing"
    assert _oracle(1.0, 1.0, times) == pytest.approx(5 / 1.8)
    half = sum(0.5 ** (n + (n < 4)) * (n + 1) for n in range(5)) / sum(
        0.5 ** (n + (n < 4)) * ms for n, ms in enumerate(times)
    )
    assert _oracle(0.5, 1.0, times) == pytest.approx(half)
    assert 1 < _oracle(0.5, 0.5, times) < half


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batches", "0"), "'0', expected whole numbers from 1 to 4096 like 1,2,4"),
        (("--batches", "1,x"), "'1,x', expected whole numbers from 1 to 4096"),
        (("--draft-lengths", "17"), "'17', expected whole numbers from 0 to 16"),
        (("--max-new-tokens", "1"), "no round runs whole"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_kept(tune, bundle, arguments, message):
    result = tune(*arguments)
    assert result.code == 2
    assert message in result.err
    assert not (bundle / "costs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--temperature", "-1"), "temperature"), (("--prompts", "nowhere.txt"), "nowhere.txt")],
)
def test_bad_input_is_refused_before_engines_are_timed(tune, monkeypatch, arguments, message):
    monkeypatch.setattr(tune_command, "fastest_engines", lambda *_: pytest.fail("engines were timed"))
    assert_refused(tune("--engine", "auto", *arguments), message)


def test_auto_without_a_table_names_the_command(run, bundle):
    result = run("generate", "--bundle", bundle, "--prompt", "x", "--draft-length", "auto")
    assert_refused(result, "run trt-spec tune")
    assert_refused(run("generate", "--bundle", bundle, "--prompt", "x", "--draft-length", "soon"), "expected auto, ")


def test_all_drafts_share_the_engine_that_runs_them_fastest_together():
    times = [{"a": {1: 1.0}, "b": {1: 5.0}, "c": {1: 0.1}}, {"a": {1: 4.0}, "b": {1: 1.0}}]
    assert [_choose([one], [1])[1] for one in times] == ["c", "b"]
    assert _choose(times, [1]) == {1: "a"}, "the engine c cannot run them all"


def test_smaller_batches_have_another_engine_only_where_that_is_clearly_faster():
    times = {"a": {1: 0.97, 2: 1.0, 4: 2.0, 8: 5.0}, "b": {1: 1.0, 2: 1.1, 4: 1.9, 8: 4.0}}
    assert _choose([times], [1, 2, 4, 8]) == {8: "b", 4: "b", 2: "a", 1: "a"}
    times["b"][1] = 0.93
    assert _choose([times], [1, 2, 4, 8]) == {8: "b", 4: "b", 2: "a", 1: "a"}, "0.93 against 0.97 is 4 %"
    times["b"][1] = 0.9
    assert _choose([times], [1, 2, 4, 8]) == {8: "b", 4: "b", 2: "a", 1: "b"}


def test_engines_are_timed_at_each_batch_and_chosen_by_all_smaller_ones_as_well(bundle, monkeypatch):
    """By a clock that only the steps advance."""
    now, timed = [0.0], set()
    seconds = {("OnnxRuntimeEngine", 1): 1.0, ("OnnxRuntimeEngine", 4): 16.0}
    seconds |= {("OpenVinoEngine", 1): 9.0, ("OpenVinoEngine", 4): 4.0}  # 6 on average: worse, though better alone
    seconds |= {("TorchEngine", 1): 4.0, ("TorchEngine", 4): 36.0}

    def scripted(engine, cache, first_row, batch, width, rows):
        step = blank_step(engine, cache, first_row, batch, width, rows)
        timed.add((batch, width))

        def run():
            step.run()
            now[0] += seconds[type(engine).__name__, batch]

        return replace(step, run=run)

    monkeypatch.setattr(fastest_engine, "blank_step", scripted)
    monkeypatch.setattr(clock, "now", lambda: now[0])
    fastest, times = fastest_engines(Bundle.open(bundle), "cpu", (1, 4), lambda text: None)
    assert timed == {(batch, width) for batch in (1, 4) for width in (1, 3, 5)}
    for by_engine in times.values():
        assert set(by_engine) == set(TIMED)
        assert by_engine["onnxruntime"] == pytest.approx({1: 1000, 4: 4000}), "their geometric mean"
        assert by_engine["openvino"] == pytest.approx({1: 9000, 4: 6000})
        assert by_engine["torch"] == pytest.approx({1: 4000, 4: 12000})
    assert fastest == {1: "onnxruntime", 4: "onnxruntime"}
    seconds["OpenVinoEngine", 4] = 1.0
    fastest, _ = fastest_engines(Bundle.open(bundle), "cpu", (1, 4), lambda text: None)
    assert fastest == {1: "onnxruntime", 4: "openvino"}


def test_each_number_of_requests_has_its_own_engines_and_each_engine_a_whole_table(run, bundle, monkeypatch):
    chosen = {1: "torch", 2: "onnxruntime", 4: "onnxruntime"}
    monkeypatch.setattr(tune_command, "fastest_engines", lambda *_: (chosen, {}))
    few = ("--max-new-tokens", 24, "--repeats", 1, "--draft-lengths", "1", "--batches", "1,2,4")
    result = run("tune", bundle, *few, "--engine", "auto")
    assert result.code == 0
    found = json.loads(result.out.splitlines()[-1])
    assert (found["engine"], [one["engine"] for one in found["other_engines"]]) == ("onnxruntime", ["torch"])
    assert {int(batch): engine for batch, engine in found["engines"].items()} == chosen
    assert [line for line in result.out.splitlines() if line.startswith("engine ")] == [
        "engine onnxruntime",
        "engine torch",
    ]
    opened = Bundle.open(bundle)
    for max_batch, engine in ((1, "torch"), (2, "onnxruntime"), (3, "onnxruntime"), (8, "onnxruntime")):
        with Decoder.open(opened, "auto", max_batch=max_batch) as decoder:
            assert decoder.engine == engine
            assert (decoder.costs.engine, decoder.costs.batches) == (engine, (1, 2, 4))


@pytest.mark.parametrize(
    ("interrupted_at", "engines", "left"),
    [
        (4, None, None),
        (5, ["onnxruntime"], "torch"),
        (8, ["onnxruntime"], "torch"),
        (11, ["onnxruntime", "torch"], None),
    ],
)
def test_an_interruption_keeps_the_engines_and_the_repeats_that_were_whole(
    run, bundle, monkeypatch, interrupted_at, engines, left
):
    """Each engine has two settings: they warm up, and have a turn in each of two repeats."""
    calls = []

    def until_then(*arguments):
        calls.append(arguments)
        if len(calls) == interrupted_at:
            signal.raise_signal(signal.SIGINT)
        measure(*arguments)

    monkeypatch.setattr(tune_command, "fastest_engines", lambda *_: ({1: "torch", 2: "onnxruntime"}, {}))
    monkeypatch.setattr(tune_command, "measure", until_then)
    monkeypatch.setattr(Decoder, "drafters", property(lambda self: ("lookup",)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    few = ("--max-new-tokens", 8, "--repeats", 2, "--draft-lengths", 1, "--batches", 1)
    result = run("tune", bundle, *few, "--engine", "auto")
    signal.signal(signal.SIGINT, before)
    assert result.code == 130
    assert result.err.endswith("trt-spec: interrupted\n")
    assert len(calls) == interrupted_at, "nothing is measured behind it"
    if engines is None:
        assert result.out == ""
        return
    found = json.loads(result.out.splitlines()[-1])
    assert [found["engine"], *(one["engine"] for one in found["other_engines"])] == engines
    for engine in engines:
        assert read_costs(Bundle.open(bundle), engine, "cpu") is not None
    assert (f"interrupted: engine {left} was not measured\n" in result.err) == (left is not None)


def test_engine_auto_keeps_the_fastest_engines_and_tunes_them(run, bundle):
    few = ("--max-new-tokens", 4, "--repeats", 1, "--draft-lengths", "1", "--batches", "1")
    result = run("tune", bundle, *few, "--engine", "auto")
    assert result.code == 0
    found = json.loads(result.out.splitlines()[-1])
    rows = [line.split() for line in result.err.splitlines() if line.startswith(("target ", "draft "))]
    times = {(model, engine): float(ms) for model, engine, ms in rows}
    assert set(times) == {(model, engine) for model in ("target", "draft") for engine in TIMED}
    target, draft = engines_of(found["engine"])
    for model, engine in (("target", target), ("draft", draft)):
        assert times[model, engine] == min(ms for (name, _), ms in times.items() if name == model)
    opened = Bundle.open(bundle)
    assert read_choice(opened, "cpu", 1) == found["engine"]
    assert read_costs(opened, found["engine"], "cpu") is not None
    with Decoder.open(bundle, "auto") as decoder:
        assert decoder.engine == found["engine"]
    assert_refused(run("tune", bundle, "--engine", "auto", "--draft-engine", "torch"), "leave --draft-engine out")
