"""LoRA adapters are merged into the weights, and the bundle says what PEFT's own model says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trt_spec.engines import ExportError
from trt_spec.export import export_bundle
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.adapters import adapter_of
from ..kit.models import tiny_gpt2, tiny_llama

KINDS = {
    "llama": (tiny_llama, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama, scaled by rank": (tiny_llama, {"target_modules": "all-linear", "use_rslora": True}),
    "llama, by direction": (tiny_llama, {"target_modules": ["o_proj"], "use_dora": True}),
    "llama, with its head": (tiny_llama, {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]}),
    "gpt2": (tiny_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_weights_are_those_of_the_adapted_model(tmp_path: Path, kind: str) -> None:
    make, settings = KINDS[kind]
    base = make(tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", **settings)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 9, 17, 5, 9]])
    with torch.no_grad():
        without = plain(ids).logits
        expected = PeftModel.from_pretrained(plain, adapter).eval()(input_ids=ids).logits
        found = load_model(open_checkpoint(base, adapter), "float32")(ids).logits
    assert float((expected - without).abs().max()) > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)


def test_the_text_is_that_of_the_adapted_model(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", target_modules="all-linear")
    [target] = export_bundle(base, tmp_path / "bundle", lora=adapter).models
    assert (target.entry.name, target.entry.check["worst_error"] < 2e-4) == ("base+adapter", True)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 17, 5, 9]])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24}
    without = plain.generate(ids, **asked)[0, 5:].tolist()
    expected = PeftModel.from_pretrained(plain, adapter).eval().generate(input_ids=ids, **asked)[0, 5:].tolist()
    assert expected != without
    with Decoder.open(tmp_path / "bundle") as decoder:
        [output] = decoder.generate(ids[0].tolist(), SamplingParams(max_new_tokens=24), draft_length=3)
    assert list(output.token_ids) == expected


def test_an_adapter_may_bring_embeddings_and_the_hub_is_not_asked(tmp_path: Path, monkeypatch: Any) -> None:
    base = tiny_llama(tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    adapted.peft_config["default"].base_model_name_or_path = "somebody/model"
    adapted.save_pretrained(tmp_path / "wider", save_embedding_layers=True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: pytest.fail("a connection was made"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    ids = torch.tensor([[5, 9, 17, 5, 9]])
    with torch.no_grad():
        found, expected = (
            load_model(open_checkpoint(base, tmp_path / one), "float32")(ids).logits for one in ("wider", "adapter")
        )
    assert torch.equal(found, expected)


def test_a_draft_may_have_its_own(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    report = export_bundle(base, tmp_path / "bundle", draft=base, draft_lora=[adapter], check=False)
    assert [model.entry.name for model in report.models] == ["base", "base+adapter"]


def test_what_is_no_adapter_of_this_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_llama(tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(ExportError, match="is an adapter; name its base model, and the adapter by --lora"):
        open_checkpoint(adapter)
    with pytest.raises(ExportError, match="1 adapter for 0 drafts, expected one for each"):
        export_bundle(base, tmp_path / "bundle", draft_lora=[adapter])
    other = tiny_llama(tmp_path / "other", hidden_size=64)
    with pytest.raises(ExportError, match=r"adapter .*adapter does not fit its base model"):
        export_bundle(other, tmp_path / "bundle", lora=adapter)
    with pytest.raises(ExportError, match=r"base has no adapter_config\.json, expected a LoRA adapter"):
        open_checkpoint(base, base)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "PROMPT_TUNING"}))
    with pytest.raises(ExportError, match="an adapter of the type PROMPT_TUNING, expected LORA"):
        open_checkpoint(base, adapter)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "LORA"}))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ExportError, match=r"has no adapter_model\.safetensors, expected its weights as safetensors"):
        open_checkpoint(base, adapter)
    assert not (tmp_path / "bundle").exists()
