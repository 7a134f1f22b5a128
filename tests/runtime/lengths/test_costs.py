"""The table of costs is kept in the bundle, holds only where it was measured, and makes auto the default there."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trt_spec.engines import Bundle
from trt_spec.runtime import BundleError, Decoder, RequestError, SamplingParams
from trt_spec.runtime.lengths.costs import Costs, machine_name, model_identities, read_costs

from ...kit.bundles import Pair
from ...kit.costs import BESIDE, table
from ...kit.machine_faults import no_file_larger_than


@pytest.fixture
def bundle(llama: Pair, tmp_path: Path) -> Bundle:
    shutil.copytree(llama.bundle, tmp_path / "bundle")
    return Bundle.open(tmp_path / "bundle")


def measured(bundle: Bundle) -> Costs:
    costs = table(beside=BESIDE, reading_ms={"model": (0.5, 0.02)})
    return replace(costs, machine=machine_name("cpu"), models=model_identities(bundle))


def test_what_is_saved_is_read_and_the_bundle_stays_whole(bundle: Bundle):
    measured(bundle).save(bundle)
    assert read_costs(Bundle.open(bundle.path), "onnxruntime", "cpu") == measured(bundle)
    assert read_costs(bundle, "torch", "cpu") is None, "another engine has other costs"
    bundle.save()
    assert "costs" not in (bundle.path / "manifest.json").read_text(), "measured anew, it may change"


def test_a_table_of_another_machine_or_other_graphs_is_not_used(bundle: Bundle):
    costs = measured(bundle)
    replace(costs, machine="another").save(bundle)
    assert read_costs(bundle, "onnxruntime", "cpu") is None
    replace(costs, models={"target": "another"}).save(bundle)
    assert read_costs(bundle, "onnxruntime", "cpu") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace("1.0", "-1.0", 1),
        lambda text: text.replace("1.0", "NaN", 1),
        lambda text: json.dumps(json.loads(text) | {"draft_lengths": [1, 2, 4]}),
        lambda text: json.dumps(json.loads(text) | {"batches": []}),
        lambda text: json.dumps(json.loads(text) | {"round_ms": {}}),
        lambda text: json.dumps(json.loads(text) | {"acceptance": {"model": 2, "lookup": 0}}),
        lambda text: json.dumps(json.loads(text) | {"beside": [2, 1]}),
        lambda text: json.dumps(json.loads(text) | {"beside": [1, "4-8"]}),
        lambda text: json.dumps(json.loads(text) | {"beside": ["4/8", 1, 2]}),
        lambda text: json.dumps(json.loads(text) | {"beside": [1, 2, "4/3"]}),
        lambda text: json.dumps(json.loads(text) | {"beside_ms": {}}),
        lambda text: json.dumps(json.loads(text) | {"beside": [1]}),
        lambda text: json.dumps(json.loads(text) | {"beside_tokens": {"model": [0.5, 2, 1]}}),
        lambda text: json.dumps(json.loads(text) | {"beside_tokens": {}}),
        lambda text: json.dumps(json.loads(text) | {"reading_ms": {"model": [0.5]}}),
        lambda text: json.dumps(json.loads(text) | {"reading_ms": {"model": [0.5, -1]}}),
        lambda text: json.dumps(json.loads(text) | {"more": 1}),
        lambda text: "[]",
    ],
)
def test_a_damaged_table_is_refused_with_what_mends_it(bundle: Bundle, damage):
    path = measured(bundle).save(bundle)
    path.write_text(damage(path.read_text()))
    with pytest.raises(
        BundleError, match=r"onnxruntime-cpu.json is not a table of costs .* run trt-spec tune .*bundle"
    ):
        Decoder.open(bundle.path)


def test_a_full_disk_leaves_the_table_as_it_was(bundle: Bundle):
    path = measured(bundle).save(bundle)
    before = path.read_bytes()
    with (
        no_file_larger_than(10),
        pytest.raises(BundleError, match=r"cannot be written .File too large.; make room"),
    ):
        measured(bundle).save(bundle)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_between_what_was_measured_times_lie_on_straight_lines():
    costs = table(batches=(1, 4), draft_lengths=(0, 2, 4), model=[[1, 3, 5], [4, 6, 8]])
    assert costs.round_times("model", 1) == pytest.approx([1, 2, 3, 4, 5])
    assert costs.round_times("model", 2) == pytest.approx([2, 3, 4, 5, 6])
    assert costs.round_times("model", 9) == pytest.approx([4, 5, 6, 7, 8]), "beyond it, as the largest batch"


def test_auto_is_the_default_once_there_is_a_table(bundle: Bundle):
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with Decoder.open(bundle) as decoder:
        assert decoder.submit([5, 6, 7], params).draft_length == 4
    measured(bundle).save(bundle)
    with Decoder.open(bundle) as decoder:
        assert decoder.submit([5, 6, 7], params).draft_length == "auto"
        assert decoder.submit([5, 6, 7], params, drafter="none").draft_length == 4
        assert decoder.submit([5, 6, 7], params, drafter="mixed").draft_length == "auto"
        sampled = replace(params, temperature=1.0)
        assert decoder.submit([5, 6, 7], sampled).draft_length == "auto"
        assert decoder.submit([5, 6, 7], replace(sampled, seed=1, rule="coupled")).draft_length == "auto"
        seeded = decoder.submit([5, 6, 7], replace(sampled, seed=1))
        assert seeded.draft_length == 4, "its text would depend on its neighbours"


def test_auto_without_a_table_is_refused_with_the_command_that_makes_one(bundle: Bundle):
    with Decoder.open(bundle) as decoder:
        for options in ({"draft_length": "auto"}, {"drafter": "mixed"}):
            with pytest.raises(RequestError, match=r"auto needs to know what rounds cost here; run trt-spec tune"):
                decoder.submit([5, 6, 7], **options)


def test_what_was_not_measured_cannot_be_chosen(bundle: Bundle):
    costs = measured(bundle)
    only_lookup = replace(costs, round_ms={"lookup": costs.round_ms["lookup"]}, acceptance={"lookup": 0.5})
    only_lookup.save(bundle)
    with Decoder.open(bundle) as decoder:
        assert decoder.submit([5, 6, 7]).draft_length == 4
        with pytest.raises(RequestError, match=r"costs of drafter lookup only, not of model; run trt-spec tune"):
            decoder.submit([5, 6, 7], draft_length="auto")
        with pytest.raises(RequestError, match=r"drafter mixed needs draft_length auto, not 3"):
            decoder.submit([5, 6, 7], draft_length=3, drafter="mixed")


@pytest.mark.parametrize(
    ("lacks", "empty"),
    [("beside", {"beside": (), "beside_ms": {}, "beside_tokens": {}}), ("reading", {"reading_ms": {}})],
)
def test_a_table_from_before_all_of_it_was_measured_is_read(bundle: Bundle, lacks: str, empty: dict[str, Any]):
    path = measured(bundle).save(bundle)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in fields.items() if lacks not in name}))
    assert read_costs(bundle, "onnxruntime", "cpu") == replace(measured(bundle), **empty)


def test_a_table_from_before_trees_were_measured_keeps_its_siblings(bundle: Bundle):
    times, stood = {"model": ((0.1, 0.2),) * 2}, {"model": (0.3, 0.5)}
    combs = replace(measured(bundle), beside=(1, 2), beside_ms=times, beside_tokens=stood)
    text = combs.save(bundle).read_text()
    for new, old in (("beside_ms", "siblings_ms"), ("beside_tokens", "sibling_acceptance"), ("beside", "siblings")):
        text = text.replace(f'"{new}"', f'"{old}"')
    (bundle.path / "costs" / "onnxruntime-cpu.json").write_text(text)
    assert read_costs(bundle, "onnxruntime", "cpu") == combs


def test_what_is_beside_a_line_costs_times_on_straight_lines_between_batches_and_more_siblings_never_less():
    measured = table(batches=(1, 3), beside={1: 0.3, 2: 0.5, "4/8": 0.7})
    costs = replace(measured, beside_ms={"model": ((0.2, 0.1, 0.05), (0.4, 0.8, 0.15))})
    assert costs.times_beside("model", 1) == pytest.approx([0.2, 0.2, 0.05])
    assert costs.times_beside("model", 2) == pytest.approx([0.3, 0.45, 0.1])
