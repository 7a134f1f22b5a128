"""Sampled texts of a crowd follow the target's distributions, whatever drafts and however short memory is.

Requests begin alike, draft in ways and by rules of their own side by side, give up their places and go on to the end of
their rows. Each of their tokens is judged by the distribution that transformers has after all before it
(kit/points.py), and so are pairs of tokens that stand 1, 2 and 3 apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from trt_spec.export.kinds import open_look_aheads
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.round import propose
from trt_spec.runtime.state.asked import DraftLength
from trt_spec.tools.making.kept_bundles import DEMO_DRAFTS, PAIR

from ..kit.asked_distributions import distribution_asked_by
from ..kit.bundles import Pair, export_pair
from ..kit.crowds import RULES, SAMPLED, SHARED, crowd, some_prompts
from ..kit.grammars import EOS, SPELLED
from ..kit.headed import Headed
from ..kit.heads import dflash_head, look_aheads, with_mtp_of_qwen
from ..kit.hybrids import Hybrid, tiny_hybrid
from ..kit.points import are_drawn, needed, points_of_texts
from ..kit.source_models import PADDING, example_sources

BUDGETS = (0.3, 0.6, 0.95)  # of the entries that all rows take with the longest texts
ROWS = 128
PREFIXES = {"prefix_bytes": 2**20}
SHORT = 256  # tokens of a row

SHARED_BY_RECURRENT = (1, 5, 40, 150, 190)  # of the longest a part is found again

# Total variations that are seen in the long tier and by hand. Recurrent layers take too long for the former.
SIZES = [pytest.param(0.05, marks=pytest.mark.exhaustive), pytest.param(0.01, marks=pytest.mark.families)]
SIZES_OF_RECURRENT = [pytest.param(size, marks=pytest.mark.families) for size in (0.05, 0.01)]
Choices = Sequence[tuple[str, DraftLength]]


def prompts_for(total_variation: float, vocab: int, longest: int, shared: Sequence[int] = SHARED) -> list[list[int]]:
    """Prompts whose texts, up to so many tokens each with their prompts, catch a fault of this total variation."""
    beside = sum(shared) // len(shared) + 9
    return some_prompts(needed(total_variation) // (longest - beside) + 1, vocab, shared)


@pytest.mark.parametrize(
    "total_variation",
    [pytest.param(0.03, marks=pytest.mark.exhaustive), pytest.param(0.01, marks=pytest.mark.families)],
)
def test_tokenwise_texts_of_a_cascade_are_drawn_from_the_targets_distributions_however_short_memory_is(
    eight: Pair, total_variation: float
) -> None:
    """So is what follows where a request has given up its place and goes on in another."""
    prompts, texts, beginnings = prompts_for(total_variation, 8, SHORT), [], []
    for place, part in enumerate(BUDGETS):
        own, choices = prompts[place :: len(BUDGETS)], [("cascade", 4), ("cascade", 3)]
        entries = int(part * min(ROWS, len(own)) * SHORT)
        found = crowd(
            eight.bundle, own, choices, rules=["tokenwise"], rows=ROWS, leave=8, entries=entries, prefix_bytes=2**18
        )
        texts += points_of_texts(eight.exact, own, found.outputs, 8, seed=place)
        beginnings += found.beginnings(texts[-len(own) :])
    assert are_drawn(texts, total_variation)
    assert are_drawn(beginnings, 5 * total_variation)


def drawn(
    bundle: Path,
    model: Any,
    choices: Choices,
    total_variation: float,
    longest: int = SHORT,
    vocab: int = 64,
    shared: Sequence[int] = SHARED,
    params: SamplingParams = SAMPLED,
    **options: Any,
) -> bool:
    prompts = prompts_for(total_variation, vocab, longest, shared)
    found = crowd(bundle, prompts, choices, params=params, **PREFIXES | options)
    assert found.found_tokens
    assert sum(map(len, found.resumed)) > 20
    points = points_of_texts(model, prompts, found.outputs, vocab, asked=distribution_asked_by(params))
    return are_drawn(points, total_variation)


@pytest.mark.parametrize("total_variation", SIZES)
@pytest.mark.parametrize("name", ["peagle", "dflash", "blockwise"])
def test_texts_by_heads_that_say_a_block(every_kind: dict[str, Headed], name: str, total_variation: float) -> None:
    headed = every_kind[name]
    assert drawn(headed.bundle, headed.target, [(name, 3), (name, "3/6"), (name, 2)], total_variation)


@pytest.mark.parametrize("total_variation", SIZES)
@pytest.mark.parametrize(
    "choices",
    [
        [("eagle3", 3), ("eagle3", "4/8"), ("eagle3", "3+3"), ("eagle3+lookup", 3)],
        [("dspark", 3), ("dspark", "3/6"), ("suffix+dspark", 2)],
        [("medusa", 3), ("medusa", "2x2x1"), ("medusa+suffix", 2)],
        [("mtp", 3), ("dspark", 3), ("eagle3", "3/6"), ("medusa", "3+3"), ("blockwise", 2), ("peagle", 3)],
    ],
)
def test_texts_by_heads_in_lines_and_trees(
    every_kind: dict[str, Headed], choices: Choices, total_variation: float
) -> None:
    """Of several heads side by side, too."""
    headed = every_kind["eagle3"]
    assert drawn(headed.bundle, headed.target, choices, total_variation)


@pytest.mark.parametrize("total_variation", SIZES)
@pytest.mark.parametrize(
    "params",
    [
        replace(SAMPLED, temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
        replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={4: 0.8}),
        replace(SAMPLED, temperature=1.2, top_p=0.92, repetition_penalty=1.2, frequency_penalty=0.1),
    ],
    ids=["cuts", "penalties", "both"],
)
def test_texts_under_cuts_and_penalties(llama: Pair, params: SamplingParams, total_variation: float) -> None:
    choices = [("model", 4), ("model", "3+3"), ("model", "4/8"), ("suffix+model", 2), ("cascade", 3)]
    assert drawn(llama.bundle, llama.reference, choices, total_variation, params=params)


@pytest.mark.parametrize("total_variation", SIZES)
def test_texts_under_a_grammar(eight: Pair, total_variation: float) -> None:
    params = SamplingParams(temperature=1.2, grammar=SPELLED, logit_bias={EOS: -inf, 6: 0.7})
    choices = [("model", 3), ("model", "3+3"), ("lookup+model", 2), ("cascade", 3)]
    assert drawn(eight.bundle, eight.exact, choices, total_variation, vocab=8, params=params)


@pytest.mark.parametrize("total_variation", SIZES)
@pytest.mark.parametrize("choices", [[("common", 3), ("common", "3+3")], [("text", 3), ("text", 5)]])
def test_texts_by_a_draft_with_other_tokens(merging: Pair, choices: Choices, total_variation: float) -> None:
    assert drawn(merging.bundle, merging.reference, choices, total_variation)


@pytest.mark.parametrize("total_variation", SIZES)
def test_texts_by_two_lines(llama: Pair, total_variation: float) -> None:
    choices = [("model+suffix", 3), ("suffix+model", 2)]
    assert drawn(llama.bundle, llama.reference, choices, total_variation)


@pytest.mark.parametrize("total_variation", SIZES)
def test_texts_with_sources(t5: Path, total_variation: float) -> None:
    """Every other draft of the bundle has or lacks an encoder of its own."""
    model, longest = AutoModelForSeq2SeqLM.from_pretrained(t5.parent / "target", dtype=torch.float32).eval(), 128
    prompts = [[0] for _ in range(needed(total_variation) // (longest - 32) + 1)]
    sources = example_sources("t5", len(prompts))
    choices = [("model", 3), ("model2", 3), ("model", "3/6"), ("model3", 2), ("model+suffix", 3), ("cascade", 3)]
    found = crowd(t5, [()] * len(prompts), choices, sources=sources)

    texts = []
    for source, output in zip(sources, found.outputs, strict=True):

        def said(ids: torch.Tensor, use_cache: bool, source: Any = source) -> Any:
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=ids, use_cache=use_cache).logits
            logits[..., PADDING] = -torch.inf
            return SimpleNamespace(logits=logits)

        texts += points_of_texts(said, [[0]], [output], 64, seed=len(texts))
    assert are_drawn(texts, total_variation)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A Qwen3.5 with its own layer of multi-token prediction and a DFlash head, or with look-aheads."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            target = tiny_hybrid("qwen3_5_text", folder / "target", vocab_size=72)
            if kind == "heads":
                drafts = [with_mtp_of_qwen(target, mtp_num_hidden_layers=1)]
                drafts.append(dflash_head(folder / "dflash", target, "authors", mask=70, scale=0.2))
            else:
                drafts = [look_aheads(folder / "head", target, 4)]
            model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
            if kind != "heads":
                opened = open_look_aheads(drafts[0])
                assert opened is not None
                opened.join(model, 72)
            made[kind] = export_pair(target, folder / "bundle", drafts).bundle, model
        return made[kind]

    return of


@pytest.mark.parametrize("total_variation", SIZES_OF_RECURRENT)
@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("heads", [("mtp", 3), ("mtp", "3/6"), ("mtp", "3+3"), ("mtp+lookup", 3)]),
        ("heads", [("dflash", 3), ("dflash", "2x2x1"), ("suffix+dflash", 2)]),
        ("look-aheads", [("pass", 3), ("pass", "3+3"), ("pass+suffix", 2)]),
    ],
)
def test_texts_of_a_recurrent_target_by_heads(
    recurrent: Callable[[str], tuple[Path, Any]], kind: str, choices: Choices, total_variation: float
) -> None:
    assert drawn(*recurrent(kind), choices, total_variation, rows=32)


@pytest.mark.parametrize("total_variation", SIZES_OF_RECURRENT)
def test_texts_of_a_recurrent_target_by_its_draft(hybrids: Callable[[str], Hybrid], total_variation: float) -> None:
    hybrid = hybrids("qwen3_5_text")
    choices = [("model", 4), ("model", "4/8"), ("model", "3+3"), ("cascade", 3), ("model+lookup", 3)]
    how: dict[str, Any] = {"longest": 512, "shared": SHARED_BY_RECURRENT, "rows": 32}
    assert drawn(hybrid.bundle, hybrid.target, choices, total_variation, **how)


@pytest.mark.parametrize("total_variation", SIZES_OF_RECURRENT)
def test_texts_of_the_shipped_hybrid(tmp_path: Path, total_variation: float) -> None:
    pair = export_pair(PAIR / "pycode-hybrid-1m", tmp_path / "bundle", DEMO_DRAFTS["model"], max_length=512)
    choices = [("model", 4), ("model", "4/8"), ("model", "3+3"), ("cascade", 3), ("model+lookup", 3)]
    how: dict[str, Any] = {"longest": 512, "shared": SHARED_BY_RECURRENT, "vocab": 4096, "rows": 32}
    assert drawn(pair.bundle, pair.reference, choices, total_variation, **how)


@pytest.mark.exhaustive
def test_a_token_drawn_from_another_distribution_shows(eight: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a draft whose tokens are drawn from a distribution a little flatter than its q."""
    draw, prompts = propose.inverse_cdf, prompts_for(0.05, 8, SHORT)
    monkeypatch.setattr(propose, "inverse_cdf", lambda weights, u: draw(weights**0.7, u))
    found = crowd(eight.bundle, prompts, [("model", 3), ("model", 2)], rules=RULES)
    assert not are_drawn(points_of_texts(eight.exact, prompts, found.outputs, 8), 0.05)
