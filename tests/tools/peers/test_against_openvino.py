"""OpenVINO GenAI itself, on graphs of our checkpoints, writes our text, and what would not compare is refused."""

import json

import pytest
from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.flags import compared
from trt_spec.tools.peers.against_openvino import OpenVino
from trt_spec.tools.timing.theirs import Theirs, differs_at, same_text
from trt_spec.tools.timing.time_rounds import Setting

from ..conftest import assert_refused
from .openvino_model import save_openvino

PROMPTS = ([5, 6, 7, 8], [9, 30, 9, 31, 9, 12], [40, 3])
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def exported(unequal, tmp_path_factory):
    folder = tmp_path_factory.mktemp("openvino")
    checkpoints = {"target": unequal.checkpoint, "draft": unequal.bundle.parent / "draft"}
    return {role: save_openvino(checkpoint, folder / role) for role, checkpoint in checkpoints.items()}


@pytest.mark.parametrize("batch", [1, 3])
def test_openvino_writes_the_tokens_that_this_runtime_writes(unequal, exported, batch):
    with Decoder.open(unequal.bundle, max_batch=3) as decoder:
        ours = [list(output.token_ids) for output in decoder.generate(list(PROMPTS), GREEDY, draft_length=0)]
    other = OpenVino(exported, "f32", batch, longest=40, cache_gigabytes=1)
    for setting in (Setting(0, "none"), Setting(3, "model"), Setting(3, "lookup")):
        theirs = Theirs(setting)
        other.measure(PROMPTS, [GREEDY] * 3, theirs)
        assert theirs.texts == ours
        assert theirs.tokens_per_second[0] > 0
        assert (len(theirs.waits.first_token), len(theirs.waits.between_tokens)) == (3, 3 * 23)
        together = theirs.waits.between_tokens.count(0.0)  # tokens that came with one before them
        assert together == 0 if setting.draft_length == 0 else together > 0


def test_the_settings_that_a_rate_depends_on_are_those_of_the_compiled_target(exported):
    found = OpenVino(exported, "f32", 1, longest=40, cache_gigabytes=1).runs_as()
    assert (found["INFERENCE_PRECISION_HINT"], found["KV_CACHE_PRECISION"]) == ("f32", "f32")
    assert found["INFERENCE_NUM_THREADS"] >= 1
    assert json.loads(json.dumps(found)) == found
    own = OpenVino(exported, None, 1, longest=40, cache_gigabytes=1).runs_as()
    assert own.keys() == found.keys()


def test_a_text_that_differs_is_said_so_with_the_place():
    ours = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert differs_at(ours, ours) == [None, None, None]
    found = {"differs_at": differs_at(ours, [[1, 2, 3], [4, 5], [7, 0, 9]])}
    assert found == {"differs_at": [None, 2, 1]}
    assert same_text(found) == "another text for 2 of 3 prompts, first at token 2"
    assert same_text({"differs_at": [None]}) == "our text"
    assert same_text({"differs_at": None}) == "sampled text"


@pytest.fixture
def compare(run, unequal, tmp_path):
    (tmp_path / "prompts.txt").write_text("def main\n\nclass stack\nimport os\n")
    few = ("--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 12, "--repeats", 1, "--draft-lengths", 2)
    return lambda *arguments: run("bench", "--bundle", unequal.bundle, *few, "--compare", "openvino", *arguments)


@pytest.fixture
def folders(exported):
    return "--openvino-target", exported["target"], "--openvino-draft", exported["draft"]


def test_openvino_is_measured_in_turn_at_the_same_draft_lengths(compare, folders, tmp_path):
    result = compare(*folders, "--batch", 2, "--report", tmp_path / "out.html", "--json", tmp_path / "out.json")
    assert result.code == 0
    found = json.loads((tmp_path / "out.json").read_text())
    compared = found["compared"]
    assert compared["name"] == "OpenVINO GenAI"
    assert compared["runs_as"]["INFERENCE_PRECISION_HINT"] == "f32"
    assert [one["draft_length"] for one in compared["settings"]] == [0, 2]
    assert [one["differs_at"] for one in compared["settings"]] == [[None] * 4] * 2
    assert "openvino-genai" in found["conditions"]["versions"]
    said = [line for line in result.out.splitlines() if line.startswith("OpenVINO GenAI, K = ")]
    assert [line.endswith("our text") for line in said] == [True, True]
    stages = [line.partition("] repeat 1 of 1, ")[2] for line in result.err.splitlines()]  # after how long it takes
    order = [stage for stage in stages if stage]
    assert order == ["K = 0", "K = 0 in OpenVINO GenAI", "K = 2", "K = 2 in OpenVINO GenAI"]
    assert "2, OpenVINO GenAI" in (tmp_path / "out.html").read_text()


def test_a_comparison_that_would_not_compare_is_refused(compare, folders, exported, unequal, tmp_path, monkeypatch):
    assert_refused(compare(), "makes them; name --openvino-target and --openvino-draft")
    assert_refused(compare(*folders, "--drafter", "suffix"), "--drafter is suffix, but --compare openvino knows only")
    assert_refused(compare(*folders, "--temperature", 0.5), "--temperature is 0.5, but OpenVINO GenAI is compared on")
    name = Bundle.open(unequal.bundle).target.name
    swapped = ("--openvino-target", exported["draft"], *folders[2:])
    message = (
        f"--openvino-target {exported['draft']} is a model of 1 layers, 2 key/value heads of 16 and 64 tokens, "
        f"the bundle's target {name} has 2 layers, 2 key/value heads of 16 and 64 tokens; export the checkpoint"
    )
    assert_refused(compare(*swapped), message)
    message = f"--openvino-target {tmp_path} has no openvino_model.xml, expected what `optimum-cli export openvino`"
    assert_refused(compare("--openvino-target", tmp_path, *folders[2:]), message)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in exported["target"].iterdir():
        if "tokenizer" not in file.name:  # without which it does not speculate
            (broken / file.name).symlink_to(file)
    result = compare("--openvino-target", broken, *folders[2:])
    assert result.code == 2
    assert f"OpenVINO GenAI cannot run {broken} with {exported['draft']} (" in result.err.splitlines()[-1]
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    result = compare("--openvino-target", tmp_path, *folders[2:])
    assert result.code == 2
    assert "openvino_model.xml is not a text model with its cache as state (" in result.err
    monkeypatch.setattr(compared, "installed", lambda package: None)
    message = "--compare openvino runs openvino-genai, which is not installed; pip install 'trt-spec[compare]'"
    assert_refused(compare(*folders), message)
