"""The round in the words of the papers writes what the decoder writes from the same seed, token for token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.round.plain import Luck, Model, run_plain_round
from trt_spec.runtime.state.noise import gumbels, uniforms
from trt_spec.runtime.state.shapes import LINE

from ...kit.bundles import Pair
from ...kit.faults import fault

PROMPT, LENGTH = [2, 7, 3], 60
SAMPLED = SamplingParams(temperature=0.9, max_new_tokens=LENGTH + 4, ignore_eos=True, seed=2**40 + 7)
RULES = ("rejection", "tokenwise", "coupled")


def model(checkpoint: Path, temperature: float) -> Model:
    """transformers in float64, which reads the whole text for each token."""
    reads = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()

    @torch.inference_mode()
    def distribution(tokens: Sequence[int]) -> Tensor:
        logits = reads(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
        return (logits / (temperature or 1.0)).softmax(-1)

    return distribution


def luck_of(params: SamplingParams, length: int, k: int) -> Luck:
    """The randomness of the decoder's round that begins at this length."""
    assert params.seed is not None
    seed = torch.tensor([[params.seed & 0xFFFFFFFF, params.seed >> 32]])
    draw, test = uniforms(seed[0], torch.tensor([length]), LINE)[0].unbind(-1)

    def inverted(distribution: Tensor, number: int) -> int:
        sums = distribution.cumsum(0)
        return int(torch.searchsorted(sums, draw[number if number < k else -1] * sums[-1], right=True))

    def likeliest(distribution: Tensor, number: int) -> int:
        noise = gumbels(seed, torch.tensor([[length + number]]), len(distribution))[0, 0] if params.temperature else 0.0
        return int((distribution.log() + noise).argmax())

    return Luck(likeliest if params.rule == "coupled" or not params.temperature else inverted, test.tolist())


def texts(pair: Pair, k: int, params: SamplingParams) -> tuple[list[int], list[int]]:
    """What the decoder and plain rounds write, before the decoder's last round, which may propose fewer tokens."""
    with Decoder.open(pair.bundle, max_batch=1) as decoder:
        [output] = decoder.generate([PROMPT], params, drafter="model", draft_length=k)
    target, draft = (model(folder, params.temperature) for folder in (pair.checkpoint, pair.bundle.parent / "draft"))
    rule = params.rule if params.temperature else "coupled"
    tokens, width = list(PROMPT), 0  # a seeded request begins without proposals, while its draft reads the prompt
    while len(tokens) < len(PROMPT) + LENGTH:
        tokens += run_plain_round(tokens, width, draft, target, rule, luck_of(params, len(tokens), width))
        width = k
    return list(output.token_ids)[:LENGTH], tokens[len(PROMPT) :][:LENGTH]


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_the_decoder_writes_what_plain_rounds_write(unequal: Pair, rule: str, k: int):
    written, plain = texts(unequal, k, replace(SAMPLED, rule=rule))
    assert written == plain


def test_greedy_text_is_that_of_plain_rounds(unequal: Pair):
    written, plain = texts(unequal, 3, replace(SAMPLED, temperature=0.0))
    assert written == plain


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ("residual of another q", "tokenwise"),
        ("block ended by its first failure", "rejection"),
        ("block test without its denominator", "rejection"),
        ("greedy draft declared sampled", "tokenwise"),
    ],
)
def test_plain_rounds_find_a_fault(unequal: Pair, planted: str, rule: str):
    with fault(planted):
        written, plain = texts(unequal, 4, replace(SAMPLED, rule=rule))
    assert written != plain
