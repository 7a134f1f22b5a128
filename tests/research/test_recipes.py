"""A pair, a draft with tokens of its own and a hybrid train from nothing, the same from the same seed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trt_spec.export import export_bundle
from trt_spec.export.checkpoints.agreement import refuse_unequal
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
from trt_spec.export.checkpoints.vocabulary import read_vocabulary
from trt_spec.tools.making.growing import LlamaSize
from trt_spec.tools.making.kept_bundles import TARGET
from trt_spec.tools.research import train_draft as train_draft_tool
from trt_spec.tools.research import train_hybrid as train_hybrid_tool
from trt_spec.tools.research import train_pair as train_pair_tool
from trt_spec.tools.research.train_draft import own_files, train_draft
from trt_spec.tools.research.train_hybrid import train_hybrid
from trt_spec.tools.research.train_pair import source_files, train_pair

pytestmark = pytest.mark.research


def test_a_pair_is_trained_from_nothing_and_the_same_from_the_same_seed(tmp_path: Path):
    files = []
    for index in range(6):
        file = tmp_path / f"{index}.py"
        file.write_text(f"def function_{index}(argument):\n    return argument + {index}\n" * 40)
        files.append(file)
    shapes = (LlamaSize(64, 2, 1, 1, 128), LlamaSize(64, 1, 1, 1, 64))
    options = {"shapes": shapes, "vocab_size": 300, "width": 32, "batch": 4, "steps": 25, "draft_steps": 25}
    found = [train_pair(tmp_path / name, (files[1:], files[:1]), **options) for name in ("one", "two")]
    assert found[0] == found[1]
    assert found[0]["target_loss"] < 0.8 * math.log(300), "it has learned something"
    assert found[0]["acceptance"][1.0] > 0.3
    for model in ("target", "draft"):
        weights = [load_file(tmp_path / name / model / "model.safetensors") for name in ("one", "two")]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    export_bundle(tmp_path / "one" / "target", tmp_path / "bundle", draft=tmp_path / "one" / "draft", check=False)


def test_a_draft_with_tokens_of_its_own_learns_the_text_itself(tmp_path: Path):
    learned, held_out = own_files()
    found = train_draft(
        tmp_path / "draft",
        (learned[:8], held_out[:2]),
        LlamaSize(64, 1, 1, 1, 64),
        vocab=300,
        width=32,
        batch=4,
        steps=60,
    )
    assert found["steps"] == 60
    assert found["loss"] < 0.8 * math.log(300), "it has learned something"
    assert 0 < found["loss_a_byte"] < found["loss"]
    assert read_vocabulary(open_checkpoint(str(tmp_path / "draft"))).entry().vocab_size == 300


def test_a_hybrid_learns_what_the_demos_target_says_the_same_from_the_same_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(train_hybrid_tool, "MEASURED", 4)
    learned, held_out = own_files()
    options = {"width": 24, "batch": 2, "steps": 24}
    found = [train_hybrid(tmp_path / name, (learned[:4], held_out[:1]), **options) for name in ("one", "two")]
    assert found[0] == found[1]
    assert found[0]["loss"] < 0.8 * math.log(4096), "it has learned something"
    assert [*found[0]["loss_without_layer"]] == [0, 1, 3]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    opened = open_checkpoint(str(tmp_path / "one"))
    assert [layer.number for layer in opened.shape.recurrent] == [0, 1, 3]
    refuse_unequal(read_vocabulary(open_checkpoint(str(TARGET))), read_vocabulary(opened))


def test_held_out_files_are_never_learned_from_and_are_the_librarys_own():
    learned, held_out = source_files()
    assert not [file for file in (*held_out, *own_files()[0]) if "site-packages" in file.parts]
    assert len(held_out) > 20
    assert not set(learned) & set(held_out)
    assert len(learned) > 19 * len(held_out)


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        (train_pair_tool, ["--draft-steps", "0"], "--draft-steps is 0, expected at least 1"),
        (train_pair_tool, ["--device", "warp"], "--device is 'warp', which torch cannot use here"),
        (train_hybrid_tool, ["--steps", "0"], "--steps is 0, expected at least 1"),
        (train_draft_tool, ["--vocab", "256"], "--vocab is 256, expected at least 257"),
        (train_draft_tool, ["--minutes", "0"], "--minutes is 0, expected more than 0"),
    ],
)
def test_the_recipes_say_what_is_wrong_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: Any, arguments: list[str], said: str
):
    assert tool.main(["--out", str(tmp_path / "out"), *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())
