"""Engine auto opens what was measured to be fastest here, and the default where nothing was."""

import json
import shutil
from pathlib import Path

import pytest
from trt_spec.engines import Bundle, BundleError
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.scheduling.engine_choice import choice_file, read_choice, resolve, save_choice

from ..kit.bundles import Pair

NO_ENGINES = [f'{{"engines": {each}, "machine": "", "models": {{}}}}' for each in ("{}", "[]", '{"few": "torch"}')]


@pytest.fixture
def bundle(llama: Pair, tmp_path: Path) -> Bundle:
    return Bundle.open(shutil.copytree(llama.bundle, tmp_path / "bundle"))


def test_auto_opens_what_was_kept_and_each_model_in_its_own_engine(bundle: Bundle):
    assert resolve(bundle, "auto", "cpu", 8) == "onnxruntime", "nothing was measured"
    save_choice(bundle, "cpu", {8: "torch+onnxruntime"})
    with Decoder.open(bundle.path, "auto") as decoder:
        assert decoder.engine == "torch+onnxruntime"
        engines = [type(model.engine).__name__ for model in (decoder.target, decoder.draft)]
        assert engines == ["TorchEngine", "OnnxRuntimeEngine"]
        [output] = decoder.generate([5, 9, 17], SamplingParams(max_new_tokens=8, ignore_eos=True), draft_length=3)
    with Decoder.open(bundle.path) as decoder:
        [expected] = decoder.generate([5, 9, 17], SamplingParams(max_new_tokens=8, ignore_eos=True), draft_length=0)
    assert output.token_ids == expected.token_ids


@pytest.mark.parametrize(("max_batch", "engine"), [(1, "a"), (2, "b"), (4, "b"), (5, "c"), (8, "c"), (9, "c")])
def test_auto_opens_what_is_fastest_up_to_the_next_batch_that_was_measured(bundle: Bundle, max_batch: int, engine: str):
    save_choice(bundle, "cpu", {1: "a", 4: "b", 8: "c"})
    assert resolve(bundle, "auto", "cpu", max_batch) == engine
    assert resolve(bundle, "torch", "cpu", max_batch) == "torch"


@pytest.mark.parametrize("field", ["machine", "models"])
def test_what_was_measured_elsewhere_does_not_count(bundle: Bundle, field: str):
    path = save_choice(bundle, "cpu", {1: "torch"})
    assert read_choice(bundle, "cpu", 1) == "torch"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: "another"}))
    assert read_choice(bundle, "cpu", 1) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", "7", '{"engines": {"1": "torch"}}', *NO_ENGINES])
def test_a_damaged_choice_is_an_error_that_says_how_to_mend_it(bundle: Bundle, content: str):
    path = choice_file(bundle.path, "cpu")
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(BundleError, match=r"does not name engines .*; run trt-spec tune .* auto --device cpu again"):
        Decoder.open(bundle.path, "auto")
