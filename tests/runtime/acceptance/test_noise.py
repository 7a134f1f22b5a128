"""The noise is Philox4x32-10 by its published answers, a pure function of seed and index, and always finite."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import gumbel_r, kstest
from scipy.stats import uniform as uniform_distribution
from trt_spec.engines import WIDEST_STEP
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.scheduling import reading, scheduler
from trt_spec.runtime.scheduling.occupants import refresh_uniforms
from trt_spec.runtime.state import noise
from trt_spec.runtime.state.noise import gumbel, gumbels, philox, uniform, uniforms
from trt_spec.runtime.state.plan import Plan
from trt_spec.runtime.state.rows import Rows
from trt_spec.runtime.state.shapes import LINE

from ...kit.bundles import Pair

SEEDS = torch.tensor([[1, 0], [2, 0], [1, 7]])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, words: str):
    def parse(text: str) -> torch.Tensor:
        return torch.tensor([int(word, 16) for word in text.split()])

    assert torch.equal(philox(parse(counter), parse(key)), parse(words))


def test_philox_of_many_counters_is_philox_of_each():
    counters, keys = torch.randint(0, 2**32, (4, 3, 5)), torch.randint(0, 2**32, (2, 3, 1))
    together = philox(counters, keys)
    for row in range(3):
        for column in range(5):
            assert torch.equal(together[:, row, column], philox(counters[:, row, column], keys[:, row, 0]))


def test_noise_does_not_depend_on_the_neighbours_the_row_or_the_width():
    index = torch.tensor([[10, 11, 12], [3, 4, 5], [10, 11, 12]])
    together = gumbels(SEEDS, index, 11)
    for row in range(3):
        for column in range(3):
            alone = gumbels(SEEDS[row : row + 1], index[row : row + 1, column : column + 1], 11)
            assert torch.equal(together[row, column], alone[0, 0])
    assert torch.equal(gumbels(SEEDS, index, 7), together[..., :7])
    assert torch.equal(gumbels(SEEDS.flip(0), index.flip(0), 11), together.flip(0))


def test_noise_that_is_made_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch):
    index = torch.tensor([[10, 11, 12], [3, 4, 5], [10, 11, 12]])
    whole = gumbels(SEEDS, index, 103)
    monkeypatch.setattr(noise, "CACHED", 9 * 4)  # of 9 tokens' noise, 16 at a time; the last piece is short
    assert torch.equal(gumbels(SEEDS, index, 103), whole)


def test_noise_differs_by_seed_index_and_purpose():
    draws = [gumbels(SEEDS, torch.full((3, 1), index), 16).flatten(0, 1) for index in (0, 1, 2**20)]
    rounds = [uniforms(SEEDS[0], torch.tensor([length]), 5).flatten() for length in (0, 1, 2)]
    everything = torch.cat([torch.cat(draws).flatten().double(), *rounds])
    assert len(everything.unique()) == len(everything)


def test_uniforms_of_a_round_do_not_depend_on_its_width_or_on_other_rounds():
    lengths = torch.tensor([5, 9, 63, 64])
    together = uniforms(SEEDS[0], lengths, 17)
    for index, length in enumerate(lengths):
        assert torch.equal(uniforms(SEEDS[0], length[None], 3)[0], together[index, :3])
    assert torch.equal(uniforms(SEEDS, lengths, 17), torch.stack([uniforms(seed, lengths, 17) for seed in SEEDS]))


def test_every_round_finds_the_uniforms_of_its_seeds_and_lengths(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    """Across blocks of lengths, with rows that begin together or not, leave, and take trees beside lines."""
    found_of, trees, seen = Rows.round_uniforms, [], set()

    def refreshed(rows: Rows, plan: Plan, occupants: Any):
        trees.append(plan.beyond > 0)
        refresh_uniforms(rows, plan, occupants)

    def checked(rows: Rows):
        draw, test, beyond = found = found_of(rows)
        for row, length in enumerate(rows.length.tolist()):
            expected = uniforms(rows.seed[row], torch.tensor([length]), WIDEST_STEP)[0]
            assert torch.equal(torch.stack([draw[row], test[row]], -1), expected[:LINE])
            assert not trees[-1] or torch.equal(beyond[row], expected[LINE:])
            seen.add(length)
        return found

    monkeypatch.setattr(Rows, "round_uniforms", checked)
    for module in (scheduler, reading):
        monkeypatch.setattr(module, "refresh_uniforms", refreshed)
    params = SamplingParams(temperature=1.0, ignore_eos=True, seed=3)
    with Decoder.open(llama.bundle, max_batch=4) as decoder:
        for shapes in ((3, 1, 16), (3, "2+3", "2/6")):
            for i, (start, new) in enumerate(((60, 30), (60, 2), (60, 90), (61, 10), (3, 140), (124, 8))):
                asked = replace(params, max_new_tokens=new, seed=i)
                decoder.submit(torch.arange(start).remainder(60).tolist(), asked, draft_length=shapes[i % len(shapes)])
            while decoder.step():
                pass
    assert {60, 63, 64, 127, 128} <= seen
    assert set(trees) == {True, False}


def test_gumbel_noise_is_finite_for_every_extreme_word():
    """A float32 uniform that rounds to 1 would give infinite noise: a random token now and then."""
    words = torch.tensor([0, 1, 2, 2**23, 2**24, 2**31, 2**32 - 2**8, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1])
    noise = gumbel(words)
    assert noise.isfinite().all()
    assert noise[0] > 22, "the likely end is fine: the smallest word gives the largest noise"
    assert (noise.diff() <= 0).all()
    assert noise[-1] < -2.5


def test_uniforms_are_inside_the_open_unit_interval_and_never_round_a_product_up():
    """u = 1 would reject a proposal with p = q, u = 0 would draw a token of weight zero."""
    words = torch.tensor([0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 2, 2**32 - 1])
    u = uniform(words[:, None], words[None]).flatten()
    assert ((u > 0) & (u < 1)).all()
    for x in (1.0, 1 - 2.0**-53, 0.1, 3.0, 1e-30, 2.0**-149, 1 + 2.0**-52):
        assert (u * x < x).all()
        assert (u * x > 0).all()


def test_noise_has_the_distributions_it_claims():
    """Kolmogorov–Smirnov over 200,000 draws of one fixed seed; a false alarm has probability 1e-6."""
    lengths = torch.arange(2000)
    noise = gumbels(torch.tensor([[3, 4]]), lengths[None], 100).flatten()
    pair = uniforms(torch.tensor([3, 4]), lengths, 50).flatten(0, 1)
    assert kstest(noise.double(), gumbel_r.cdf).pvalue > 1e-6
    for column in range(2):
        assert kstest(pair[:, column], uniform_distribution.cdf).pvalue > 1e-6
    correlation = torch.corrcoef(pair.T)[0, 1].abs()
    assert correlation < 4.9 / len(pair) ** 0.5  # 1e-6 of a normal lies beyond 4.9
