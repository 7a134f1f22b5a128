"""Pickled weights become safetensors that export as the same model, and no pickle is run."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trt_spec.engines import ExportError
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.kinds import open_head
from trt_spec.tools.making.convert_pickle import main

from ...kit.heads import parallel_heads
from ...kit.models import tiny_gpt2, tiny_llama


def pickled(path: Path) -> dict[str, torch.Tensor]:
    """Put a checkpoint's weights into two pickles, as older versions of transformers wrote them."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        torch.save({name: weights[name] for name in part}, path / f"pytorch_model-0000{number}-of-00002.bin")
    return weights


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_the_weights_are_the_same(tmp_path: Path, make, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "checkpoint")
    before = {name: weight.clone() for name, weight in load_model(open_checkpoint(path), "float32").named_parameters()}
    pickled(path)
    with pytest.raises(ExportError, match=r"only pickled weights .*python -m trt_spec\.tools\.making\.convert_pickle"):
        open_checkpoint(path)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path / "model.safetensors")
    after = dict(load_model(open_checkpoint(path), "float32").named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert main([str(path)]) == 2, "it is there already"


def test_medusa_heads_as_their_authors_save_them_become_heads(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    head = parallel_heads(tmp_path / "head", target, "medusa")
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    torch.save(tensors, head / "medusa_lm_head.pt")
    with pytest.raises(ExportError, match=r"only pickled weights \(medusa_lm_head.pt\)"):
        open_head(head)
    assert main([str(head)]) == 0
    opened = open_head(head)
    assert opened is not None
    assert opened.kind.name == "medusa"
    assert opened.tensors().keys() == tensors.keys()


class Evil:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.trace), "w")


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, as_zip: bool, capsys) -> None:
    file, trace = tmp_path / "pytorch_model.bin", tmp_path / "ran"
    if as_zip:
        torch.save({"weight": torch.zeros(2), "more": Evil(trace)}, file)
    else:
        file.write_bytes(pickle.dumps(Evil(trace)))
    assert main([str(tmp_path)]) == 2
    assert "pytorch_model.bin is not read" in capsys.readouterr().err
    assert not trace.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_what_holds_more_than_tensors_and_what_holds_none_is_refused(tmp_path: Path, capsys) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no pytorch_model*.bin and no medusa_lm_head.pt" in capsys.readouterr().err
    torch.save({"state": {"weight": torch.zeros(2)}}, tmp_path / "pytorch_model.bin")
    assert main([str(tmp_path)]) == 2
    assert "holds more than tensors by name" in capsys.readouterr().err
