"""Rows of a target in shards may have adapters, each its own; every shard holds its share of their matrices."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.adapters import Adapted
from ...kit.shards import in_shards, run_with_a_preemption

PROMPT = [5, 9, 17, 5, 9, 20, 33]
ROWS = (None, "wide", "narrow", "wide", None)  # their adapters
TOKENS = 16
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=TOKENS, temperature=1, seed=7, ignore_eos=True)
CHOICES = [(0, "none"), ("3x2", "model"), (4, "suffix")]
SHARDS = (2, 4)  # with four, two have the same head of keys


@pytest.fixture(scope="module")
def folder(adapted: Adapted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shards in (1, *SHARDS):
        in_shards(adapted.pair.bundle, folder / str(shards), shards)
    return folder


def opened(folder: Path, adapted: Adapted, shards: int) -> Decoder:
    decoder = Decoder.open(folder / str(shards), "torch", max_batch=3, prefix_bytes=2**22)
    for name, adapter in adapted.folders.items():
        decoder.load_adapter(name, adapter)
    return decoder


@pytest.fixture(scope="module")
def whole(folder: Path, adapted: Adapted) -> Iterator[Decoder]:
    with opened(folder, adapted, 1) as decoder:
        yield decoder


@pytest.fixture(scope="module", params=[SHARDS[0], pytest.param(SHARDS[1], marks=pytest.mark.exhaustive)])
def sharded(folder: Path, adapted: Adapted, request: pytest.FixtureRequest) -> Iterator[Decoder]:
    with opened(folder, adapted, request.param) as decoder:
        yield decoder


def texts(decoder: Decoder, params: SamplingParams, length: object, drafter: str) -> list[tuple[int, ...]]:
    rows = [decoder.submit(PROMPT, params, draft_length=length, drafter=drafter, adapter=one) for one in ROWS]
    while decoder.step():
        pass
    return [one.output().token_ids for one in rows]


@pytest.mark.parametrize(("length", "drafter"), CHOICES)
def test_each_row_says_what_it_says_on_one_device(
    whole: Decoder, sharded: Decoder, adapted: Adapted, length: object, drafter: str
) -> None:
    found = texts(sharded, GREEDY, length, drafter)
    assert found == [adapted.said(one, PROMPT, TOKENS) for one in ROWS]
    assert len(set(found)) == 3
    assert texts(sharded, SAMPLED, length, drafter) == texts(whole, SAMPLED, length, drafter)


def test_greedy_rounds_with_adapters_gather_the_best_of_each_shard_alone(sharded: Decoder) -> None:
    texts(sharded, GREEDY, 2, "suffix")
    logits = sharded._scheduler.frame.target_logits
    assert (logits.isfinite()).sum(-1).unique().tolist() == [sharded.bundle.target.contract.shards]


def test_a_row_that_gives_up_its_place_goes_on_with_its_adapter(sharded: Decoder, adapted: Adapted) -> None:
    rows = [sharded.submit(PROMPT, GREEDY, draft_length=3, adapter=one) for one in ROWS]
    run_with_a_preemption(sharded)
    assert [one.output().token_ids for one in rows] == [adapted.said(one, PROMPT, TOKENS) for one in ROWS]


def test_an_adapter_that_takes_anothers_place_leaves_nothing_of_it(sharded: Decoder, adapted: Adapted) -> None:
    """`wide` has columns where `narrow` has none."""
    for name in ("wide", "narrow"):
        sharded.load_adapter("one", adapted.folders[name])
        [output] = sharded.generate([PROMPT], GREEDY, adapter="one")
        assert output.token_ids == adapted.said(name, PROMPT, TOKENS)
        sharded.unload_adapter("one")


def test_each_shard_holds_its_share_of_the_matrices_that_are_split(sharded: Decoder, adapted: Adapted) -> None:
    shards, pool = sharded.bundle.target.contract.shards, sharded._models.adapters
    products = {one.name.rpartition(".")[2]: one for one in sharded.bundle.target.contract.adapters.products}
    [part] = products["k_proj"].output_parts
    assert part.size == products["k_proj"].outputs
    assert not products["k_proj"].input_parts
    assert products["down_proj"].input_parts
    assert not products["down_proj"].output_parts
    for one in products.values():
        (down, inputs, _), (up, outputs, _) = one.matrices
        by_rows = one.name.endswith(("o_proj", "down_proj"))
        assert pool._matrices[down].shape[1] == inputs // (shards if by_rows else 1)
        shared = min(shards, 2) if one.name.endswith(("k_proj", "v_proj")) else shards
        assert pool._matrices[up].shape[1] == outputs // (1 if by_rows else shared)
