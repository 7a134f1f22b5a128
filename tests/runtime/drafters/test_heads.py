"""Heads propose by what the target has made of each token, whatever happened before, and change no distribution.

The oracle is the head in torch over transformers' own hidden states, asked anew for each round.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trt_spec.engines import Bundle, RequestError, State, keys_and_values
from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.runtime.drafters import masked
from trt_spec.runtime.drafters.drafter import normalised_entropy
from trt_spec.runtime.drafters.head import Head, States
from trt_spec.runtime.memory.features import Features
from trt_spec.runtime.memory.model import Model
from trt_spec.runtime.memory.row_cache import RowCache

from ...kit.costs import LENGTHS, known_costs, table
from ...kit.distributions import CLOSE, ENOUGH, FAR, compared, kept_bytes, worst_distribution
from ...kit.headed import Headed, in_a_bundle
from ...kit.heads import dflash_head
from ...kit.models import tiny_llama


@pytest.fixture(scope="module")
def headed(every_kind: dict[str, Headed]) -> Headed:
    return every_kind["eagle3"]


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *(("eagle3", memory) for memory in ("prefixes", "short")),
        ("mtp", "ample"),
        ("peagle", "short"),
        ("dflash", "prefixes"),
        ("dspark", "short"),
    ],
)
def test_each_proposal_is_drawn_from_the_heads_distribution_over_the_targets_features(
    every_kind: dict[str, Headed], name: str, memory: str
) -> None:
    """In lines and trees, beside copies, after rounds without it, after a prefix was found and places were given up."""
    headed = every_kind[name]
    options = {
        "ample": {},
        "prefixes": {"prefix_bytes": kept_bytes(headed, 512)},
        "short": {"cache_bytes": kept_bytes(headed, 320), "prefix_bytes": kept_bytes(headed, 128)},
    }[memory]
    worst, drawn = compared(headed, **options)
    assert drawn > ENOUGH
    assert worst < CLOSE


@pytest.mark.parametrize("name", ["medusa", "blockwise"])
def test_heads_that_say_a_place_each_read_the_last_features_and_nothing_else(
    every_kind: dict[str, Headed], name: str
) -> None:
    worst, drawn = compared(every_kind[name], prefix_bytes=kept_bytes(every_kind[name], 512))
    assert drawn > ENOUGH
    assert worst < CLOSE
    with patch.object(Features, "into", late):
        assert compared(every_kind[name], far=FAR)[0] > FAR


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark", "medusa"])
def test_the_torch_engine_runs_heads(every_kind: dict[str, Headed], name: str) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=12, seed=4, ignore_eos=True)
    headed = every_kind[name]
    with Decoder.open(headed.bundle, engine="torch") as decoder:
        [output] = decoder.generate([[7, 1, 30]], params, draft_length=3, drafter=name, trace=True)
    worst, drawn = worst_distribution(headed, [7, 1, 30], output)
    assert drawn
    assert worst < CLOSE


def late(self: Features, given: torch.Tensor, first_row: int, start: torch.Tensor) -> Callable[[], None]:
    return original(self, given, first_row, start + 1)


def not_handed_on(self: Any, nodes: torch.Tensor, made: torch.Tensor) -> None:
    handed(self, nodes.flip(1), made)


original, handed, follows, straighten = Features.into, States.hand_on, masked.before, RowCache.straighten


def test_a_block_whose_tokens_do_not_follow_one_another_would_show(every_kind: dict[str, Headed]) -> None:
    with patch.object(masked, "before", lambda i, frame, line: frame.recent[:, -1:].expand_as(follows(i, frame, line))):
        worst, _ = compared(every_kind["dspark"], far=FAR)
    assert worst > FAR


@torch.no_grad()
def doubts(headed: Headed, tokens: list[int], proposal: list[int]) -> list[float]:
    """Return how unsure the head is of each of so many proposals, and of the next, by what comes before them."""
    features, count = headed.features([*tokens, *proposal, 0]), len(tokens)
    if headed.head.confidence_head is None:
        distributions = headed.distributions(
            tokens, features, [proposal[:place] for place in range(len(proposal) + 1)], 0
        )
        return [float(normalised_entropy(distribution.log()[None])) for distribution in distributions]
    [states] = headed.head.blocks(torch.tensor(tokens), features[: count - 1], [count - 1])
    before = torch.tensor([*tokens[-1:], *proposal])
    return (1 - headed.head.confidence(states[: len(before)], before)).tolist()


@pytest.mark.parametrize("confidence", [None, 0, pytest.param(32, marks=pytest.mark.exhaustive)])
def test_a_block_ends_before_the_token_of_which_its_head_is_not_sure(
    every_kind: dict[str, Headed], tmp_path: Path, confidence: int | None
) -> None:
    """By its confidence, which may read the token before or not, or by its entropy where it has none."""
    headed, longest = every_kind["dspark"], 4
    if confidence is not None:
        target = tiny_llama(tmp_path / "target", padded_vocab=72, initializer_range=0.2, num_hidden_layers=3)
        head = dflash_head(
            tmp_path / "dspark", target, "authors", mask=70, scale=0.3, rank=8, seed=3, confidence=confidence
        )
        headed = in_a_bundle(tmp_path / "bundle", target, {"dspark": head})["dspark"]
    limit = 0.6 if confidence != 0 else 0.8
    rule, ended = EntropyRule(shortest=longest, longest=longest, stop_above=limit), set()
    with Decoder.open(headed.bundle) as decoder:
        for params in (
            SamplingParams(temperature=1.0, max_new_tokens=40, ignore_eos=True, seed=3),
            SamplingParams(temperature=1.0, max_new_tokens=40, ignore_eos=True, seed=4, rule="coupled"),
            SamplingParams(max_new_tokens=20, ignore_eos=True),
        ):
            [output] = decoder.generate([[7, 1, 30]], params, draft_length=rule, drafter="dspark", trace=True)
            if params.rule == "coupled" or params.temperature == 0:
                [alone] = decoder.generate([[7, 1, 30]], params, draft_length=0)
                assert output.token_ids == alone.token_ids
            assert worst_distribution(headed, [7, 1, 30], output)[0] < CLOSE
            tokens = [7, 1, 30]
            for one in output.trace or ():
                found = doubts(headed, tokens, list(one.proposal))
                assert one.entropies == pytest.approx(found[: len(one.proposal)], abs=CLOSE)
                assert max(one.entropies, default=0.0) <= limit + CLOSE
                room = 3 + params.max_new_tokens - len(tokens) - 1
                if len(tokens) > 3:  # the reading of the prompt gives the first token
                    assert len(one.proposal) >= min(longest, room) or found[len(one.proposal)] > limit - CLOSE
                ended.add(len(one.proposal))
                tokens += [*one.standing, *([] if one.next_token is None else [one.next_token])]
    assert len(ended) > 2, "some blocks end early, some do not"


def test_features_one_entry_late_would_show(headed: Headed) -> None:
    with patch.object(Features, "into", late):
        worst, _ = compared(headed, far=FAR)
    assert worst > FAR


def features_left_behind(self: RowCache, start: torch.Tensor, path: torch.Tensor) -> None:
    """Where a sibling stands its keys and values move, and the features stay those of the node that fell."""
    kept = self.buffers["features"].clone() if "features" in self.buffers else None
    straighten(self, start, path)
    if kept is not None:
        self.buffers["features"].copy_(kept)


def test_features_of_a_node_that_fell_would_show(headed: Headed) -> None:
    with patch.object(RowCache, "straighten", features_left_behind):
        worst, _ = compared(headed, far=FAR)
    assert worst > FAR


@pytest.mark.parametrize("fault", ["features late", "features of a node that fell", "states mixed up"])
def test_what_a_head_reads_wrongly_changes_no_text(headed: Headed, fault: str) -> None:
    swap = {
        "features late": (Features, "into", late),
        "features of a node that fell": (RowCache, "straighten", features_left_behind),
        "states mixed up": (States, "hand_on", not_handed_on),
    }[fault]
    prompts = [[5, 9], [7, 1, 30, 2], [11] * 40]
    for params in (
        SamplingParams(max_new_tokens=30),
        SamplingParams(temperature=1.0, max_new_tokens=30, seed=4, rule="coupled"),
    ):
        with patch.object(*swap), Decoder.open(headed.bundle, max_batch=4) as decoder:
            alone = decoder.generate(prompts, params, draft_length=0)
            found = decoder.generate(prompts, params, draft_length="4/8", drafter="eagle3")
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        assert sum(one.speculation.accepted for one in found) > 0


def test_a_tree_whose_states_are_mixed_up_would_show(headed: Headed) -> None:
    with patch.object(States, "hand_on", not_handed_on):
        worst, _ = compared(headed, far=FAR)
    assert worst > FAR


def test_what_was_read_without_features_is_read_again_or_it_would_show(headed: Headed) -> None:
    with patch.object(Head, "window", lambda self, widest: 2):
        worst, _ = compared(headed)
    assert worst < CLOSE, "a narrow window only makes it read before the round"
    with patch.object(Model, "reads_again", property(lambda self: False)):
        worst, _ = compared(headed, far=FAR)
    assert worst > FAR


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_greedy_and_coupled_texts_are_those_without_a_draft(headed: Headed, rule: str) -> None:
    """Each head in every second shape, so that those of a kind, which are neighbours in this list, have them all."""
    prompts, params = [[3], [5, 9], [7, 1, 30, 2], [11] * 40], SamplingParams(max_new_tokens=30)
    if rule == "coupled":
        params = replace(params, temperature=1.0, seed=4, rule=rule)
    shapes = cycle([1, 4, "3+3", "4/8", "3x2x1"])
    with Decoder.open(headed.bundle, max_batch=4) as decoder:
        alone = decoder.generate(prompts, params, draft_length=0)
        for drafter in ("eagle3", "mtp", "peagle", "dflash", "dspark", "medusa", "blockwise"):
            for length in islice(shapes, 3):
                found = decoder.generate(prompts, params, draft_length=length, drafter=drafter)
                assert [one.token_ids for one in found] == [one.token_ids for one in alone], (drafter, length)
                assert sum(one.speculation.proposed for one in found) > 30


def test_auto_and_mixed_run_heads_as_their_costs_say(headed: Headed) -> None:
    prompts, params = [[7, 1, 30, 2], [11] * 40], SamplingParams(max_new_tokens=40, ignore_eos=True)
    steps = {"eagle3": 0.1, "medusa": 0.3, "lookup": 2.0, "suffix": 2.0}  # copies never pay
    costs = table(
        acceptance=0.9,
        reading_ms={"eagle3": (0.5, 0.01), "medusa": (0.0, 0.0)},
        **{name: [[1.0 + step * k * batch for k in LENGTHS] for batch in (1, 8)] for name, step in steps.items()},
    )
    for drafter, able in (("eagle3", {"eagle3"}), ("medusa", {"medusa"}), ("mixed", {"eagle3", "medusa"})):
        with known_costs(costs), Decoder.open(headed.bundle, max_batch=2) as decoder:
            requests = [decoder.submit(prompt, params, drafter=drafter) for prompt in prompts]
            chosen = set()
            while decoder.step():
                chosen |= {row.chooser.wanted.drafter for row in decoder.live if row.chooser.wanted.length}
            alone = decoder.generate(prompts, params, draft_length=0)
        assert [tuple(request.token_ids) for request in requests] == [one.token_ids for one in alone]
        assert chosen
        assert chosen <= able


def test_a_head_is_what_requests_draft_with_where_a_bundle_has_no_draft(headed: Headed) -> None:
    with Decoder.open(headed.bundle) as decoder:
        assert decoder.submit([3, 4]).drafting.drafter == "eagle3"
        assert "eagle3" in decoder.growing
        with pytest.raises(RequestError, match="no draft model"):
            decoder.submit([3, 4], drafter="model")


def test_a_bundle_without_heads_refuses_them_in_a_sentence(llama: Any) -> None:
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match="no eagle3 head; export one"):
        decoder.submit([3, 4], drafter="eagle3")


def test_the_target_keeps_features_of_each_token_and_the_head_reads_hidden_states(headed: Headed) -> None:
    bundle = Bundle.open(headed.bundle)
    assert bundle.heads == ("eagle3", "mtp", "peagle", "dflash", "dspark", "medusa", "blockwise")
    assert bundle.target.contract.states[0] == State("features", (1, 224), "float32")
    assert bundle.features("blockwise") == slice(192, 224)
    assert bundle.models["medusa"].contract.states == (State("hidden", (32,), "float32", "call"),)
    states = bundle.models["eagle3"].contract.states
    assert states == (State("hidden", (32,), "float32", "call"), *keys_and_values(1, 2, 16, "float32"))
