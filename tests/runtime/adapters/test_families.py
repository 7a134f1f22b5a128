"""Texts with adapters are those of transformers with PEFT in families of all kinds, and heads go on drafting them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.adapters import ROOM, Adapted, adapter_of
from ...kit.bundles import Pair
from ...kit.families import tiny_checkpoint
from ...kit.heads import eagle3_head, mtp_head
from ...kit.models import tiny_llama

pytestmark = pytest.mark.exhaustive
PROMPT, TOKENS = [5, 9, 17, 5, 9, 20, 33], 16
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
ROWS = ("one", None, "other", "one")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FAMILIES: dict[str, dict[str, Any]] = {  # by default all products that the bundle has room beside
    "qwen2": {},
    "gemma2": {},
    "gpt2": {"fan_in_fan_out": True},
    "phi3": {},
    "qwen3_moe": {"target_modules": ATTENTION},  # PEFT would adapt the experts by names that others have, too
    "deepseek_v3": {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},  # MLA
    "lfm2": {},  # recurrent layers
    "bamba": {},
    "qwen3_next": {"target_modules": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]},
}


def said_in_turn(decoder: Decoder, **asked: Any) -> list[tuple[int, ...]]:
    rows = [decoder.submit(PROMPT, GREEDY, adapter=one, **asked) for one in ROWS]
    while decoder.step():
        pass
    return [one.output().token_ids for one in rows]


def opened(bundle: Path, folders: dict[str, Path]) -> Decoder:
    decoder = Decoder.open(bundle)
    for name, folder in folders.items():
        decoder.load_adapter(name, folder)
    return decoder


@pytest.mark.parametrize("kind", FAMILIES)
def test_texts_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    base = tiny_checkpoint(kind, tmp_path / "base")
    [target] = export_bundle(base, tmp_path / "bundle", **ROOM).models
    layers = sorted({one.name.rpartition(".")[2] for one in target.entry.contract.adapters.products})
    settings = {"target_modules": layers, **FAMILIES[kind]}
    folders = {name: adapter_of(base, tmp_path / name, seed, **settings) for seed, name in enumerate(("one", "other"))}
    adapted = Adapted(Pair(base, tmp_path / "bundle"), folders)
    expected = {name: adapted.said(name, PROMPT, TOKENS) for name in (None, *folders)}
    assert len(set(expected.values())) == 3
    with opened(tmp_path / "bundle", folders) as decoder:
        for asked in ({"draft_length": 0}, {"draft_length": 4, "drafter": "suffix"}):
            assert said_in_turn(decoder, **asked) == [expected[one] for one in ROWS]


@pytest.mark.parametrize("head", [eagle3_head, mtp_head])
def test_heads_draft_for_a_target_with_adapters(tmp_path: Path, head: Callable[..., Path]) -> None:
    base = tiny_llama(tmp_path / "base", padded_vocab=72, initializer_range=0.2, num_hidden_layers=3)
    made = head(tmp_path / "head", base, *([48] if head is eagle3_head else []), scale=0.25)
    report = export_bundle(base, tmp_path / "bundle", draft=made, check=False, **ROOM)
    assert report.models[0].entry.contract.adapters is not None
    folders = {
        name: adapter_of(base, tmp_path / name, seed, target_modules="all-linear")
        for seed, name in enumerate(("one", "other"))
    }
    with opened(tmp_path / "bundle", folders) as decoder:
        plain = said_in_turn(decoder, draft_length=0)
        name = head.__name__.removesuffix("_head")
        assert name in decoder.drafters
        assert len(set(plain)) == 3
        assert said_in_turn(decoder, draft_length=3, drafter=name) == plain
        assert decoder.by_drafter[name].proposed


def test_peft_and_the_bundle_name_layers_alike(tmp_path: Path) -> None:
    """Of a checkpoint whose text model is a part, transformers gives other names than PEFT if it is loaded whole."""
    base = tiny_llama(tmp_path / "base")
    [target] = export_bundle(base, tmp_path / "bundle", check=False, **ROOM).models
    names = {name for name, _ in AutoModelForCausalLM.from_pretrained(base).named_modules()}
    assert {one.name for one in target.entry.contract.adapters.products} <= names
