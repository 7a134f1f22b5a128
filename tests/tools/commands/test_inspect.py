import json
import shutil
from dataclasses import replace

from trt_spec.engines import SOURCE, Bundle
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.bundles import export_pair
from ...kit.source_models import tiny_with_source
from ..conftest import assert_refused


def test_the_numbers_are_those_of_the_files(run, llama):
    found = json.loads(run("inspect", llama.bundle, "--json").out)
    files = [path for path in llama.bundle.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert found["bytes"] == sum(path.stat().st_size for path in files)
    assert found["files"] == len(files)
    bundle = Bundle.open(llama.bundle)
    for role, entry in (("target", bundle.target), ("draft", bundle.draft)):
        model = found["models"][role]
        assert model["weight_bytes"] == (llama.bundle / role / "weights.bin").stat().st_size
        assert model["graph_bytes"] == (llama.bundle / role / "model.onnx").stat().st_size
        assert model["parameters"] == entry.parameters
        assert model["inputs"] == [str(spec) for spec in entry.contract.inputs]
        assert model["outputs"] == [str(spec) for spec in entry.contract.outputs]
        assert model["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # key and value, layers, heads, head size, float32
        assert model["kv_bytes_per_row"] == model["kv_bytes_per_token"] * bundle.max_length
    assert found["max_length"] == bundle.max_length


def test_every_draft_has_a_column_and_counts(run, drafts):
    found, bundle = json.loads(run("inspect", drafts.bundle, "--json").out), Bundle.open(drafts.bundle)
    assert list(found["models"]) == ["target", "draft", "draft2"]
    assert found["memory"]["weight_bytes"] == sum(map(bundle.weight_bytes, bundle.names))
    assert ["target", "draft", "draft2"] in [line.split() for line in run("inspect", drafts.bundle).out.splitlines()]


def test_the_cache_it_foretells_is_at_least_what_a_decoder_comes_to_hold(run, llama):
    length = 200
    memory = json.loads(run("inspect", llama.bundle, "--batch", 3, "--length", length, "--json").out)["memory"]
    with Decoder.open(llama.bundle, max_batch=3) as decoder:
        params = SamplingParams(max_new_tokens=10, ignore_eos=True)
        requests = [decoder.submit([5] * (length - 10), params) for _ in range(3)]
        largest = 0
        while not all(request.finished for request in requests):
            decoder.step()
            caches = (decoder.target.cache, decoder.draft.cache)
            largest = max(largest, sum(buffer.nbytes for cache in caches for buffer in cache.buffers.values()))
    assert largest <= memory["cache_bytes"] <= 1.5 * largest
    assert memory["total_bytes"] == memory["cache_bytes"] + memory["weight_bytes"]


def test_a_person_can_read_it(run, llama):
    result = run("inspect", llama.bundle, "--batch", 2)
    assert result.code == 0
    assert "in   input_ids int64[batch, width]" in result.out
    assert "in   past_key_0 … past_value_1 float32[batch, 2, capacity, 16] (4)" in result.out
    assert "out  logits float32[batch, rows, 64]" in result.out
    assert "memory for 2 × 256 tokens: " in result.out


def test_the_check_of_the_export_is_shown(run, llama, tmp_path):
    copy = tmp_path / "checked"
    shutil.copytree(llama.bundle, copy)
    opened = Bundle.open(copy)
    target = replace(opened.target, check={"worst_error": 2e-6, "tolerance": 1e-4})
    replace(opened, models={"target": target, "draft": replace(opened.draft, check={})}).save()
    line = next(line for line in run("inspect", copy).out.splitlines() if line.startswith("checked"))
    assert "worst error 2.0e-06 of 1.0e-04 allowed" in line
    assert line.endswith("no")


def test_a_length_the_bundle_does_not_allow_is_refused(run, llama):
    message = "--length is 257, expected at most the 256 tokens the bundle allows"
    assert_refused(run("inspect", llama.bundle, "--length", 257), message)


def test_a_folder_that_is_no_bundle_is_refused(run, tmp_path):
    assert_refused(run("inspect", tmp_path), "has no manifest.json, so it is not a bundle")


def test_encoders_and_what_sources_take_are_shown(run, tmp_path):
    export_pair(tiny_with_source("t5", tmp_path / "checkpoint"), tmp_path / "bundle")
    found = json.loads(run("inspect", tmp_path / "bundle", "--batch", 2, "--json").out)
    encoder, memory = found["encoders"]["encoder"], found["memory"]
    assert (encoder["feeds"], encoder["longest"]) == (["target"], 2048)
    each = sum(state.bytes for state in Bundle.open(tmp_path / "bundle").target.contract.of_kind(SOURCE))
    assert memory["source_bytes"] == 2 * 2048 * each > 0
    assert memory["total_bytes"] == sum(memory[f"{name}_bytes"] for name in ("weight", "cache", "source"))
    said = run("inspect", tmp_path / "bundle").out
    assert "\nencoder: of checkpoint, reads up to 2,048 tokens for target; " in said
    assert " of sources = " in said
