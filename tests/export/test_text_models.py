"""Checkpoints that read more than text: their text model is exported, and says what the whole says to text."""

from pathlib import Path

import pytest
import torch
from trt_spec.engines import ExportError
from trt_spec.export import export_bundle
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.families.text_models import READS_MORE, UNSCALED
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.whole_models import whole_of


@pytest.mark.parametrize("kind", READS_MORE)
def test_the_text_model_is_what_the_whole_is_on_text(tmp_path: Path, kind: str) -> None:
    whole = whole_of(kind, tmp_path / "whole")
    checkpoint = open_checkpoint(tmp_path / "whole")
    ids = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        if kind in UNSCALED:
            expected = expected * whole.config.text_config.logit_scale
        found = load_model(checkpoint, "float32")(ids).logits
    assert float(expected.std()) > 0.05
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)
    assert (checkpoint.reads_more, checkpoint.architecture != kind) == (kind, True)


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "gemma3" else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in READS_MORE],
)
def test_its_greedy_text_is_that_of_the_whole(tmp_path: Path, kind: str) -> None:
    whole = whole_of(kind, tmp_path / "whole")
    report = export_bundle(tmp_path / "whole", tmp_path / "bundle")
    assert report.models[0].entry.check["worst_error"] < 2e-4
    assert f"reads more than text ({kind}): its text model" in report.notes[0]
    assert any("logits times 0.0625, as its text model says" in note for note in report.notes) == (kind in UNSCALED)
    prompt = [5, 9, 17, 5, 9]
    ids = torch.tensor([prompt])
    expected = whole.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=1
    )
    with Decoder.open(tmp_path / "bundle") as decoder:
        [output] = decoder.generate(prompt, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
    assert list(output.token_ids) == expected[0, len(prompt) :].tolist()


def test_a_tensor_that_belongs_to_no_part_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole_of("gemma3", tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(file)
    tensors["language_model.model.layers.7.self_attn.q_proj.weight"] = torch.zeros(2)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ExportError, match=r"holds 1 tensors that a gemma3_text .* the first is model\.layers\.7"):
        load_model(open_checkpoint(tmp_path / "whole"), "float32")
