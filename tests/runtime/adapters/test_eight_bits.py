"""Rows with adapters keep their keys and values in eight bits, too: texts are those of PEFT over such a cache."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trt_spec.engines import Bundle
from trt_spec.export.checking.oracle import checkpoint_logits
from trt_spec.export.checking.rounded_cache import entries_rounded
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.adapters import ROOM, Adapted
from ...kit.bundles import export_pair, noisy_draft
from ...kit.caches import factors_of

PROMPT, TOKENS = [5, 9, 17, 5, 9, 20, 33], 24
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
ROWS = (None, "wide", "narrow", "wide", None)
TIE = 0.03  # of logits whose deviation is 2: entries between two numbers of eight bits, which libraries round apart


@pytest.fixture(scope="module")
def bundle(adapted: Adapted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    alone = export_pair(adapted.pair.checkpoint, folder / "alone", cache="int8", **ROOM)
    return noisy_draft(alone.bundle, folder / "bundle", 0.05)


@pytest.fixture(scope="module")
def plain(adapted: Adapted, bundle: Path) -> dict[str | None, tuple[int, ...]]:
    """The texts of requests that are alone."""
    with opened(adapted, bundle, max_batch=1) as decoder:
        return {name: decoder.generate([PROMPT], GREEDY, adapter=name)[0].token_ids for name in {*ROWS}}


def opened(adapted: Adapted, bundle: Path, **options: object) -> Decoder:
    decoder = Decoder.open(bundle, **options)
    for name, folder in adapted.folders.items():
        decoder.load_adapter(name, folder)
    return decoder


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_each_row_of_a_batch_says_what_it_would_say_alone(adapted: Adapted, bundle: Path, plain: dict, engine: str):
    assert len(set(plain.values())) == 3
    with opened(adapted, bundle, engine=engine, prefix_bytes=2**22) as decoder:
        for length in (1, 4, "3x2", "2/5"):
            rows = [decoder.submit(PROMPT, GREEDY, draft_length=length, drafter="model", adapter=one) for one in ROWS]
            while decoder.step():
                pass
            assert [one.output().token_ids for one in rows] == [plain[one] for one in ROWS]


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_a_text_is_that_of_peft_over_a_cache_that_rounds_alike(adapted: Adapted, bundle: Path, plain: dict, name: str):
    model = AutoModelForCausalLM.from_pretrained(adapted.pair.checkpoint, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapted.folders[name]).merge_and_unload().eval()
    with entries_rounded(model, Bundle.open(bundle).target.contract, factors_of(bundle)):
        said = checkpoint_logits(model, [*PROMPT, *plain[name]])[len(PROMPT) - 1 : -1]
    behind = said.amax(-1) - said[torch.arange(TOKENS), list(plain[name])]
    assert float(behind.max()) < TIE
    assert int((behind > 0).sum()) <= 1
