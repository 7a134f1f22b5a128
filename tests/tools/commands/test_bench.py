import json
import re
import shutil
import signal
from dataclasses import replace
from statistics import median

import pytest
from trt_spec.engines import Bundle
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.flags import compared
from trt_spec.tools.in_words import pair
from trt_spec.tools.peers.against_transformers import PLAIN, Arrivals, Transformers
from trt_spec.tools.prompts.shipped import PYTHON_PROMPTS
from trt_spec.tools.text_files import read_prompts
from trt_spec.tools.theory.lines import tokens_per_round
from trt_spec.tools.timing import clock
from trt_spec.tools.timing.theirs import Theirs
from trt_spec.tools.timing.time_rounds import PARTS, Measured, Setting, TimedRound, Waits, measure

from ...kit.bundles import export_pair
from ...kit.costs import known_costs
from ...kit.foreign import merging_draft
from ...kit.gguf_model import write_gguf
from ...kit.models import tiny_llama
from ..conftest import assert_refused


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def main\n\nclass stack\nimport os\n")
    return file


@pytest.fixture
def bench(run, llama, prompts):
    few = ("--prompts", prompts, "--max-new-tokens", 24, "--repeats", 1, "--draft-lengths", "2,4")
    return lambda *arguments: run("bench", "--bundle", llama.bundle, *few, *arguments)


@pytest.fixture
def both(bench, tmp_path):
    """The table that is printed, and the object that is written."""

    def both(*arguments):
        result = bench(*arguments, "--json", tmp_path / "found.json")
        return result, json.loads((tmp_path / "found.json").read_text())

    return both


def test_the_result_is_a_table_and_a_consistent_json_object(bench, both):
    result, found = both()
    assert result.code == 0
    assert "tokens/s" in result.out
    assert "{" not in result.out
    assert json.loads(bench("--json").out).keys() == found.keys()
    assert [one["draft_length"] for one in found["settings"]] == [0, 2, 4]
    plain = found["settings"][0]
    assert (plain["speed_up"], plain["predicted"], plain["acceptance"]) == (1.0, 1.0, None)
    for one in found["settings"]:
        k, counts = one["draft_length"], one["speculation"]
        expected = tokens_per_round(one["acceptance"] or 0.0, k) / (one["c"] * k + one["v"])
        assert one["predicted"] == pytest.approx(expected)
        assert one["paper"] == pytest.approx(tokens_per_round(one["acceptance"] or 0.0, k) / (one["c"] * k + 1))
        assert one["c"] * k * plain["verify_ms"] == pytest.approx(one["draft_ms"])
        assert one["v"] == pytest.approx(one["verify_ms"] / plain["verify_ms"])
        assert one["round_overhead"] == pytest.approx(one["round_ms"] / (one["draft_ms"] + one["verify_ms"]))
        assert one["speed_up"] == pytest.approx(one["tokens_per_second"] / plain["tokens_per_second"])
        assert counts["rounds"] * counts["tokens_per_round"] == pytest.approx(3 * (24 - 1)), "one with the prompt"
    roof = found["roof"]
    assert roof["roof_ms"] == pytest.approx(1e3 * roof["weight_bytes"] / roof["bandwidth_bytes_per_second"])
    assert roof["bare_over_roof"] == pytest.approx(plain["verify_ms"] / roof["roof_ms"])


def test_a_round_reads_the_weights_of_its_steps_and_what_their_caches_hold(bench, llama):
    found, bundle = json.loads(bench("--json").out), Bundle.open(llama.bundle)
    size = {name: 4 * model.parameters for name, model in bundle.models.items()}
    entry = {name: model.contract.cache_bytes_per_token for name, model in bundle.models.items()}
    bandwidth = found["roof"]["bandwidth_bytes_per_second"]
    tokens = set()
    for one in found["settings"]:
        k, read = one["draft_length"], one["bytes_per_round"]
        held, odd = divmod(read - size["target"] - k * size["draft"], entry["target"] + k * entry["draft"])
        assert odd == 0
        tokens.add(held)
        assert one["bandwidth_share"] == pytest.approx(read / (1e-3 * one["round_ms"] * bandwidth))
        assert one["on_device"] is None, "nothing is recorded on the CPU"
    assert 8 < min(tokens) <= max(tokens) < 15 + 24, "of prompts of some ten tokens, and half of what was written"
    assert found["recorded_kinds"] == 0


def test_the_parts_of_a_round_and_the_waits_are_those_of_whole_rounds(bench):
    found = json.loads(bench("--json").out)
    drafting = {one["draft_length"]: one["parts_ms"]["draft"] for one in found["settings"]}
    assert drafting[0] < 0.1 * drafting[2], "without a draft, between two looks at the clock"
    for one in found["settings"]:
        parts = one["parts_ms"]
        assert list(parts) == list(PARTS)
        assert 0.5 < sum(parts.values()) / one["round_ms"] < 1.5, "medians need not add up"
        for waits in (one["first_token_ms"], one["between_tokens_ms"]):
            assert 0 <= waits["p50"] <= waits["p99"]
        assert min(one["tokens_per_second_each"]) <= one["tokens_per_second"] <= max(one["tokens_per_second_each"])
    assert found["memory"]["peak_resident_bytes"] > 50e6
    assert found["memory"]["gpu_bytes"] is None
    assert {"python", "torch", "trt-spec", "onnxruntime"} == set(found["conditions"]["versions"])


def test_the_first_token_of_a_round_waits_and_the_others_come_with_it():
    waits = Waits()
    waits.add(3, 20.0, first=True)
    waits.add(2, 5.0, first=False)
    assert (waits.first_token, waits.between_tokens) == ([20.0], [0.0, 0.0, 5.0, 0.0])
    assert waits.to_json()["first_token_ms"] == {"p50": 20.0, "p99": 20.0}
    assert waits.to_json()["between_tokens_ms"]["p50"] == 0.0


def test_the_rate_is_that_of_whole_batches(llama):
    """By a clock that only rounds advance: a row that ends leaves a place empty, which a service would fill."""
    seconds = [0.0]
    before = clock.CLOCK.set(lambda: seconds[0])
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (8, 30)]
    measured = Measured(Setting(0, "none"))
    with Decoder.open(llama.bundle, max_batch=2) as decoder:
        step = decoder.step

        def timed():
            seconds[0] += 1.0
            return step()

        decoder.step = timed
        measure(decoder, ["ab", "def main"], params, measured)
    clock.CLOCK.reset(before)
    assert measured.tokens_per_second == [2.0]
    assert 0 < len(measured.rounds) < 8


def test_every_token_has_a_wait(llama):
    params = [SamplingParams(max_new_tokens=20, ignore_eos=True)] * 4
    with Decoder.open(llama.bundle, max_batch=2) as decoder:
        measured = Measured(Setting(3, "model"))
        measure(decoder, ["ab", "def main", "import os", "class"], params, measured)
    assert len(measured.waits.first_token) == 4
    assert len(measured.waits.between_tokens) == 4 * 19
    assert len(measured.parts_ms) == len(measured.round_ms)


@pytest.fixture
def checkpoints(unequal):
    return "--target-checkpoint", unequal.checkpoint, "--draft-checkpoint", unequal.bundle.parent / "draft"


@pytest.fixture
def compare(run, unequal, prompts, capfd):
    few = ("--prompts", prompts, "--max-new-tokens", 12, "--repeats", 1, "--draft-lengths", "2", "--compare", "hf")
    capfd.readouterr()  # what transformers wrote while the checkpoints were made
    return lambda *arguments: run("bench", "--bundle", unequal.bundle, *few, *arguments)


def refuse_here(*_):
    raise AssertionError("transformers was opened in the process of bench")


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_transformers_is_measured_apart_at_the_same_draft_lengths(compare, checkpoints, drafter, monkeypatch, tmp_path):
    monkeypatch.setattr(Transformers, "__init__", refuse_here)
    result = compare(*checkpoints, "--drafter", drafter, "--json", tmp_path / "out.json")
    assert result.code == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["compared"]["name"] == "transformers"
    assert found["compared"]["runs_as"] == {"dtype": "float32", "attention": "sdpa"}
    assert [one["draft_length"] for one in found["compared"]["settings"]] == [0, 2]
    for one in found["compared"]["settings"]:
        assert one["differs_at"] == [None] * 3
        assert one["tokens_per_second"] > 0
        assert one["first_token_ms"]["p50"] > 0
        assert 0 <= one["between_tokens_ms"]["p50"] <= one["between_tokens_ms"]["p99"]
    assert "transformers" in found["conditions"]["versions"]
    assert sum(line.startswith("transformers, K = ") for line in result.out.splitlines()) == 2
    order = re.findall(r"^\[ *\d+%, about .* left\] repeat 1 of 1, (.*)$", result.err, re.MULTILINE)
    assert order == ["K = 0", "K = 0 in transformers", "K = 2", "K = 2 in transformers"]


def test_transformers_writes_the_tokens_that_this_runtime_writes(unequal):
    """Greedy, and sampled from one token: whatever proposes."""
    other = Transformers(unequal.checkpoint, unequal.bundle.parent / "draft")
    with Decoder.open(unequal.bundle) as decoder:
        prompt = decoder.tokenizer.encode("def main").ids
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        [ours] = decoder.generate(prompt, params, draft_length=0)
    narrow = SamplingParams(max_new_tokens=24, temperature=1.0, top_k=1, seed=1)
    for setting in (PLAIN, Setting(3, "model"), Setting(3, "lookup")):
        for asked in (params, narrow):
            arrivals = Arrivals()
            assert tuple(other.generate(prompt, asked, setting, arrivals)) == ours.token_ids
            assert sum(count for _, count in arrivals.tokens) == 24
    theirs = Theirs(Setting(3, "model"))
    other.measure([prompt, prompt], [params, params], theirs)
    assert (len(theirs.waits.first_token), len(theirs.waits.between_tokens)) == (2, 2 * 23)


def test_transformers_assists_with_other_tokens_where_the_draft_has_them(run, unequal, prompts, tmp_path, capfd):
    draft = merging_draft(tmp_path / "draft")
    bundle = export_pair(unequal.checkpoint, tmp_path / "bundle", draft).bundle
    capfd.readouterr()
    result = run(
        *("bench", "--bundle", bundle, "--prompts", prompts, "--max-new-tokens", 12, "--repeats", 1),
        *("--draft-lengths", "2", "--compare", "hf", "--drafter", "text", "--json", tmp_path / "out.json"),
        *("--target-checkpoint", unequal.checkpoint, "--draft-checkpoint", draft),
    )
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["draft_length"] for one in found["compared"]["settings"]] == [0, 2]
    assert all(one["differs_at"] == [None] * 3 for one in found["compared"]["settings"])


def test_transformers_reads_a_gguf_file_as_the_export_does(run, prompts, tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    export_bundle(file, tmp_path / "bundle", check=False)
    few = ("--prompts", prompts, "--max-new-tokens", 8, "--repeats", 1, "--draft-lengths", "2")
    result = run(
        "bench", "--bundle", tmp_path / "bundle", *few, "--compare", "hf", "--target-checkpoint", file, "--json"
    )
    assert result.code == 0, result.err
    for one in json.loads(result.out)["compared"]["settings"]:
        assert one["differs_at"] == [None] * 3


def test_a_comparison_that_would_not_compare_is_refused(compare, checkpoints, unequal, tmp_path, monkeypatch):
    assert_refused(compare(), "--compare hf runs the checkpoints of the bundle; name --target-checkpoint and --draft-")
    assert_refused(compare(*checkpoints, "--batch", 2), "--batch is 2, but transformers assists one prompt at a time")
    swapped = ("--target-checkpoint", checkpoints[3], "--draft-checkpoint", checkpoints[3])
    name = Bundle.open(unequal.bundle).target.name
    message = (
        f"--target-checkpoint {checkpoints[3]} is a llama of another shape, the bundle's target {name} is a llama of"
    )
    assert_refused(compare(*swapped), message)
    wider = tiny_llama(tmp_path / "wider", intermediate_size=80)
    result = compare("--target-checkpoint", wider, *checkpoints[2:])
    assert result.code == 2
    assert f"--target-checkpoint {wider} is a model of" in result.err.splitlines()[-1]
    monkeypatch.setattr(compared, "installed", lambda package: None)
    message = "--compare hf runs transformers, which is not installed; pip install 'trt-spec[export]'"
    assert_refused(compare(*checkpoints), message)


def test_the_table_has_a_line_for_each_draft_length(bench):
    lines = bench().out.splitlines()
    assert lines[0].split("  ")[0].strip() == "K"
    assert lines[0].endswith("predicted  the paper's")
    assert [line.split()[0] for line in lines[1:4]] == ["0", "2", "4"]
    assert lines[4].startswith("the bare target takes ")


def test_a_batch_is_filled_with_prompts_again(bench):
    found = json.loads(bench("--batch", 2, "--temperature", 1, "--rule", "coupled", "--json").out)
    assert (found["batch"], found["prompts"]) == (2, 4)
    assert found["sampling"]["rule"] == "coupled"


def test_a_lossy_setting_says_so_in_record_and_table(bench, both):
    result, found = both("--lenience", 0.5)
    assert found["lossless"] is False
    assert result.out.splitlines()[4] == "lossy: with lenience 0.5 the output is not distributed as the target's own"
    assert json.loads(bench("--json").out)["lossless"] is True


def test_lookup_has_no_bare_draft_and_counts_rounds_that_propose(bench):
    found = json.loads(bench("--drafter", "lookup", "--json").out)
    for one in found["settings"]:
        counts = one["speculation"]
        assert (one["draft_ms"], one["c"]) == (0.0, 0.0)
        assert one["proposing"] == sum(counts["histogram"]) / counts["rounds"]


def test_the_one_pass_of_a_cascade_is_its_bare_draft_and_its_prediction_counts_what_it_proposes(bench):
    found = json.loads(bench("--drafter", "cascade", "--json").out)
    for one in found["settings"][1:]:
        k, counts = one["draft_length"], one["speculation"]
        assert one["draft_ms"] > 0
        assert counts["proposed"] < k * counts["rounds"]
        assert one["predicted"] < tokens_per_round(one["acceptance"], k) / (one["c"] * k + one["v"])


def test_bare_runs_between_rounds_leave_every_text_as_it_is(llama):
    params = [SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(4)]
    prompts = ["ab", "def main", "import os", "class"]
    texts = []
    with Decoder.open(llama.bundle, max_batch=4) as decoder:
        alone = decoder.generate(prompts, params, draft_length=3)
        measured = Measured(Setting(3, "model"))
        submit = decoder.submit
        decoder.submit = lambda *given, **named: texts.append(submit(*given, **named)) or texts[-1]
        measure(decoder, prompts, params, measured)
    assert [request.output().token_ids for request in texts] == [output.token_ids for output in alone]
    assert len(measured.bare.verify) >= 2
    assert len(measured.bare.draft["model"]) == 2 * len(measured.bare.first_draft["model"])


def test_the_first_draft_step_has_its_own_time():
    measured = Measured(Setting(4, "model"), rounds=[TimedRound(12.0, [], replayed=False)])
    measured.bare.first_draft["model"] = [1.0, 3.0, 9.0]
    measured.bare.draft["model"] = [0.5, 0.5, 7.0]
    measured.bare.verify += [5.5]
    assert measured.draft_ms == 3.0 + 3 * 0.5
    assert measured.round_overhead == median(measured.round_ms) / 10.0
    measured.bare.first_draft["model2"] = [2.0]
    assert measured.draft_ms == 3.0 + 3 * 0.5 + 2.0, "each draft model has its own"


def test_several_lines_are_measured(bench, tmp_path):
    """Theory has no number for them."""
    page = tmp_path / "page.html"
    result = json.loads(bench("--drafter", "model+random", "--report", page, "--json").out)
    assert result["drafter"] == "model+random"
    assert [one["predicted"] is None for one in result["settings"]] == [False, True, True]
    assert result["settings"][1]["round_overhead"] > 0
    assert "model+random" in page.read_text()


@pytest.mark.parametrize("lengths", ["17", "1,x", "", "-1"])
def test_bad_draft_lengths_are_refused(run, lengths):
    message = f"argument --draft-lengths: {lengths!r}, expected whole numbers from 0 to 16 like 0,2,4"
    assert_refused(run("bench", "--bundle", "b", f"--draft-lengths={lengths}"), message)


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(bench, tmp_path):
    message = f"output {tmp_path / 'no' / 'out.json'} cannot be written (No such file or directory)"
    assert_refused(bench("--json", tmp_path / "no" / "out.json"), message)
    assert_refused(bench("--json", tmp_path), f"output {tmp_path} is a directory, expected a file name")


def test_too_few_tokens_to_measure_a_round_are_refused_and_leave_no_file(bench, tmp_path):
    result = bench("--max-new-tokens", 1, "--json", tmp_path / "out.json")
    assert result.code == 2
    assert "K = 0: with 1 new tokens no round runs whole" in result.err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize("name", ["--repeats", "--batch"])
def test_counts_must_be_positive(run, name):
    assert_refused(run("bench", "--bundle", "b", name, "0"), f"argument {name}: '0', expected a whole number >= 1")


def test_prompts_come_one_a_line_or_as_json_lines(tmp_path, prompts):
    assert read_prompts(prompts) == ["def main", "class stack", "import os"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PYTHON_PROMPTS))
    assert read_prompts(lines) == list(PYTHON_PROMPTS)


def test_bad_prompt_files_are_refused(bench, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    message = f"""prompt 2 of {file} is '{{"text": "b"}}', expected an object like {{"prompt": "text"}}"""
    assert_refused(bench("--prompts", file), message)
    file.write_text("\n\n")
    assert_refused(bench("--prompts", file), f"prompt file {file} holds no prompt, expected one a line")


def test_every_drafter_has_a_row(both, llama):
    result, found = both("--all-drafters", "--draft-lengths", "1")
    assert [one["draft_length"] for one in found["settings"]] == [0, 1]
    assert found["drafter"] == "model", "whose lengths are compared"
    with Decoder.open(llama.bundle) as decoder:
        others = [drafter for drafter in decoder.drafters if drafter != "model"]
    assert [(one["drafter"], one["draft_length"]) for one in found["drafters"]] == [(other, 4) for other in others]
    rows = [line.split()[:2] for line in result.out.splitlines()]
    assert all([other, "4"] in rows for other in others)


def test_the_draft_that_was_measured_is_named(run, drafts, prompts, tmp_path):
    opened = Bundle.open(shutil.copytree(drafts.bundle, tmp_path / "bundle"))
    named = replace(opened.models["draft2"], name="second")
    replace(opened, models=opened.models | {"draft2": named}).save()
    few = ("--prompts", prompts, "--max-new-tokens", 8, "--repeats", 1, "--draft-lengths", "2")
    found = json.loads(run("bench", "--bundle", opened.path, *few, "--drafter", "model2", "--json").out)
    assert (found["drafter"], found["draft"]) == ("model2", "second")
    assert found["settings"][1]["draft_ms"] > 0
    assert pair(found) == f"{found['target']} with draft second"


def test_combs_and_trees_have_rows_behind_the_lines(both):
    result, found = both("--draft-lengths", "3+2,1,3/7,2x2")
    assert [one["draft_length"] for one in found["settings"]] == [0, 1]
    assert [(one["draft_length"], one["shape"]) for one in found["shapes"]] == [(3, "3+2"), (3, "3/7"), (2, "2x2")]
    for one in found["shapes"]:
        assert one["tokens_per_second"] > 0
        assert any(line.split()[:1] == [one["shape"]] for line in result.out.splitlines())


def test_a_comb_that_cannot_be_is_refused_before_any_measuring(bench):
    assert_refused(
        bench("--draft-lengths", "3+2", "--drafter", "lookup"), "drafter lookup can put nothing beside its proposals"
    )


def test_auto_has_a_row_once_costs_are_known(bench, both):
    with known_costs():
        result, found = both("--drafter", "mixed")
        assert [one["draft_length"] for one in found["settings"]] == [0], "mixed has no length of its own"
        assert found["auto"]["drafter"] == "mixed"
        assert found["auto"]["mean_draft_length"] > 0
        assert "auto" in [line.split()[0] for line in result.out.splitlines()[:3]]
        assert json.loads(bench("--json").out)["auto"]["drafter"] == "model", "it is the default"
    assert json.loads(bench("--json").out)["auto"] is None
    assert_refused(bench("--draft-lengths", "1,auto"), "auto needs to know what rounds cost here")


def test_quick_says_what_it_does_and_shows_each_row_when_it_is_known(run, llama):
    result = run("bench", "--bundle", llama.bundle, "--quick")
    assert result.code == 0
    said = "quick: K of 0, 2, 4, on 3 prompts, 64 tokens each, once"
    assert f"{said}, or less, to take less than two minutes for a model of" in result.err
    shown = [line for line in result.err.splitlines() if re.fullmatch(r"K = \d: [\d.]+ tokens/s", line)]
    assert len(shown) == 3
    assert len(result.out.splitlines()) == 1 + 3 + 1


def test_quick_measures_what_the_clock_leaves_time_for(run, llama, monkeypatch):
    monkeypatch.setattr("trt_spec.tools.flags.pace.QUICK_SECONDS", 0.0)
    result = run("bench", "--bundle", llama.bundle, "--quick", "--json")
    assert "quick: there is time for 1 of 3 prompts, 16 tokens each\n" in result.err
    found = json.loads(result.out)
    assert (found["prompts"], found["sampling"]["max_new_tokens"]) == (1, 16)
    stated = run("bench", "--bundle", llama.bundle, "--quick", "--json", "--max-new-tokens", 20)
    assert json.loads(stated.out)["prompts"] == 3, "what the user states stays"


def test_quick_promises_no_time_for_what_the_user_states(run, llama, prompts):
    stated = ("--repeats", 2, "--max-new-tokens", 20, "--draft-lengths", "1", "--prompts", prompts)
    result = run("bench", "--bundle", llama.bundle, "--quick", *stated, "--json")
    assert "quick: K of 1, on 3 prompts, 20 tokens each, 2 times\n" in result.err
    found = json.loads(result.out)
    assert (found["repeats"], found["sampling"]["max_new_tokens"]) == (2, 20)
    assert [one["draft_length"] for one in found["settings"]] == [0, 1]
    assert {len(one["tokens_per_second_each"]) for one in found["settings"]} == {2}


def test_an_interruption_keeps_the_repeats_that_were_whole(run, llama, monkeypatch):
    calls = []

    def until_the_second_repeat(*arguments):
        calls.append(arguments)
        if len(calls) == 6:  # two settings: warmed up, measured once, and half of that again
            signal.raise_signal(signal.SIGINT)
        measure(*arguments)

    monkeypatch.setattr("trt_spec.tools.measuring.bench.measure", until_the_second_repeat)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    result = run("bench", "--bundle", llama.bundle, "--draft-lengths", 2, "--max-new-tokens", 16, "--repeats", 3)
    signal.signal(signal.SIGINT, before)
    assert result.code == 130
    assert "interrupted: this is what 1 of 3 repeats have measured\n" in result.err
    assert result.err.endswith("trt-spec: interrupted\n")
    assert [line.split()[0] for line in result.out.splitlines()[1:3]] == ["0", "2"]
