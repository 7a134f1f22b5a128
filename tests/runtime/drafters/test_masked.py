"""Drafts that say all tokens of a round in one pass propose by the distributions that they have after masks.

The oracle is the draft in torch, asked anew for each round.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM
from trt_spec.engines import Bundle, ExportError, Masks, RequestError
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.model import Model

from ...kit.bundles import Pair, export_pair
from ...kit.distributions import CLOSE, ENOUGH, FAR, VOCAB, compared, kept_bytes
from ...kit.models import tiny_llama

MASK = 66  # the draft has tokens beyond those of its tokenizer


class Masked:
    """A draft that reads masks, in a bundle and in torch."""

    def __init__(self, pair: Pair, draft: Path) -> None:
        self.bundle, self.name = pair.bundle, "pard"
        self.draft: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()

    def features(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(0)

    def distributions(
        self, tokens: list[int], features: torch.Tensor, paths: list[list[int]], committed: int
    ) -> list[torch.Tensor]:
        """Return its distribution after each of these paths of proposals, which it does not know, after `tokens`."""
        most = max(map(len, paths))
        said = self.draft(torch.tensor([[*tokens, *[MASK] * most]])).logits[0, :, :VOCAB].softmax(-1)
        return [said[len(tokens) - 1 + len(path)] for path in paths]


def mark(checkpoint: Path, token: Any) -> Path:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"pard_token": token}))
    return checkpoint


@pytest.fixture(scope="module")
def pard(tmp_path_factory: pytest.TempPathFactory) -> Masked:
    folder = tmp_path_factory.mktemp("pard")
    target = tiny_llama(folder / "target", initializer_range=0.2)
    draft = mark(
        tiny_llama(folder / "draft", padded_vocab=72, initializer_range=0.2, num_hidden_layers=1, seed=1), MASK
    )
    return Masked(export_pair(target, folder / "bundle", draft), draft)


@pytest.mark.parametrize("memory", ["ample", "prefixes", "short"])
def test_each_proposal_is_drawn_from_the_distribution_behind_masks(pard: Masked, memory: str) -> None:
    """In lines and trees, beside copies, after rounds without it, after a prefix was found and places were given up."""
    options: dict[str, Any] = {
        "ample": {},
        "prefixes": {"prefix_bytes": kept_bytes(pard, 512)},
        "short": {"cache_bytes": kept_bytes(pard, 320), "prefix_bytes": kept_bytes(pard, 128)},
    }[memory]
    worst, drawn = compared(pard, **options)
    assert drawn > ENOUGH
    assert worst < CLOSE


def test_masks_that_are_left_where_tokens_belong_would_show(pard: Masked) -> None:
    with patch.object(Model, "reads_again", property(lambda self: False)):
        worst, _ = compared(pard, far=FAR)
    assert worst > FAR


@pytest.mark.parametrize("length", [1, 4, "3+3", "4/8", "3x2x1"])
def test_greedy_and_coupled_texts_are_those_without_a_draft(pard: Masked, length: int | str) -> None:
    prompts = [[3], [5, 9], [7, 1, 30, 2], [11] * 40]
    for params in (
        SamplingParams(max_new_tokens=30),
        SamplingParams(temperature=1.0, max_new_tokens=30, seed=4, rule="coupled"),
    ):
        with Decoder.open(pard.bundle, max_batch=4) as decoder:
            alone = decoder.generate(prompts, params, draft_length=0)
            for drafter in ("pard", "model", "model+pard"):
                if drafter != "pard" and length != 4:
                    continue
                found = decoder.generate(prompts, params, draft_length=length, drafter=drafter)
                assert [one.token_ids for one in found] == [one.token_ids for one in alone]
                assert sum(one.speculation.proposed for one in found) > 30


def test_the_bundle_says_what_stands_for_an_unknown_token(pard: Masked) -> None:
    assert Bundle.open(pard.bundle).models["draft"].masks == Masks(MASK)
    with Decoder.open(pard.bundle) as decoder:
        assert decoder.submit([3, 4]).drafting.drafter == "pard", "one pass instead of K"


def test_a_mask_that_is_no_token_is_refused(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", num_hidden_layers=1)
    draft = mark(tiny_llama(tmp_path / "draft", num_hidden_layers=1, seed=1), 64)
    with pytest.raises(ExportError, match="has the pard_token 64, expected one of its 64 tokens"):
        export_pair(target, tmp_path / "bundle", draft)


def test_a_draft_that_reads_no_masks_is_refused_in_a_sentence(llama: Pair) -> None:
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match="no draft that reads masks"):
        decoder.submit([3, 4], drafter="pard")
