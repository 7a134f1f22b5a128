"""K by the draft's own entropy: the more certain it is, the more it proposes, and a round may end early."""

from pathlib import Path

import pytest
import torch
from trt_spec.engines import RequestError
from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.runtime.drafters.drafter import normalised_entropy
from trt_spec.runtime.lengths.chooser import Pause
from trt_spec.runtime.lengths.entropy import ByEntropy
from trt_spec.runtime.requests.metrics import Outcome
from trt_spec.runtime.state.frame import Frame

from ...kit.bundles import Pair
from ...kit.scripts import target
from ..scripted import scripted_decoder

LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)


def observe(chooser: ByEntropy, *entropies: float) -> None:
    """One round in which so many proposals were examined, all of them accepted."""
    chooser.observe("model", Outcome(len(entropies), len(entropies), len(entropies) + 1), entropies)


def test_entropy_is_0_where_one_token_is_certain_and_1_where_all_are_alike():
    certain, alike, two = torch.full((8,), -torch.inf), torch.zeros(8), torch.full((8,), -torch.inf)
    certain[3], two[:2] = 5.0, 1.0
    found = normalised_entropy(torch.stack([certain, alike, two]))
    torch.testing.assert_close(found, torch.tensor([[0.0], [1.0], [1 / 3]]))


def test_the_draft_length_falls_from_longest_to_shortest_as_entropy_rises():
    chooser = ByEntropy(EntropyRule(shortest=2, longest=10, smoothing=0.0), "model")
    lengths = []
    for entropy in (0.0, 0.25, 0.5, 1.0):
        observe(chooser, entropy)
        lengths.append(chooser.wanted.length)
    assert lengths == [10, 8, 6, 2]
    observe(chooser)
    assert chooser.wanted.length == 2, "a round that examined nothing says nothing"


def test_what_was_seen_before_is_smoothed():
    chooser = ByEntropy(EntropyRule(shortest=0, longest=10, smoothing=0.5), "model")
    assert chooser.wanted.length == 10
    observe(chooser, 0.4, 0.8)
    assert chooser.wanted.length == 4, "the mean, at first"
    observe(chooser, 1.0)
    assert chooser.wanted.length == 2, "half of .6 and half of 1"


def test_a_rule_that_came_to_propose_nothing_tries_again(tmp_path: Path):
    """The draft is uncertain for a while, so that the length falls to 0; it is certain again from then on."""
    with scripted_decoder(tmp_path, target, target) as decoder:
        rule = EntropyRule(shortest=0, longest=4, smoothing=0.0)
        request = decoder.submit([1, 2, 3], LONG, draft_length=rule)
        decoder.draft.engine.height = 0.0
        for _ in range(5):
            decoder.step()
        proposed = request.speculation.proposed
        decoder.draft.engine.height = 20.0
        for _ in range(Pause.FIRST + 10):
            decoder.step()
        assert request.speculation.proposed > proposed
        assert {outcome.proposed for outcome in request.speculation.outcomes} >= {0, 2, 4}


@pytest.mark.parametrize("on_host", [True, False])
def test_a_round_ends_before_the_proposal_at_which_the_draft_is_too_uncertain(
    tmp_path: Path, on_host: bool, monkeypatch: pytest.MonkeyPatch
):
    """Where the host sees it its steps end there, too; without that the same is proposed."""
    monkeypatch.setattr(Frame, "on_host", property(lambda self: on_host, lambda self, value: None), raising=False)
    with scripted_decoder(tmp_path, target, target) as decoder:
        rule = EntropyRule(shortest=6, longest=6, stop_above=0.5)
        request = decoder.submit([1, 2, 3], LONG, draft_length=rule, trace=True)
        decoder.step()
        engine = decoder.draft.engine

        def uncertain_in_the_third_run() -> None:
            engine.height = 0.0 if len(engine.widths) == 3 else 20.0

        engine.on_run = uncertain_in_the_third_run
        for _ in range(8):
            engine.widths.clear()
            decoder.step()
            assert len(engine.widths) == (3 if on_host else 6)
    rounds = request.trace[2:]
    assert [len(traced.proposal) for traced in rounds] == [2] * 8
    assert all(max(traced.entropies) < 0.01 for traced in rounds)
    reference = [1, 2, 3]
    for _ in request.token_ids:
        reference.append(target(reference))
    assert request.token_ids == reference[3:]


def test_the_trace_holds_the_entropy_of_each_proposal(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        ruled = decoder.submit([5, 6, 7], LONG, draft_length=EntropyRule(1, 5), trace=True)
        other = decoder.submit([8, 9], LONG, draft_length=2, trace=True)
        for _ in range(30):
            decoder.step()
        lengths = {len(traced.proposal) for traced in ruled.trace}
        assert len(lengths) > 1, "it does choose"
        assert lengths <= set(range(6))
        for traced in ruled.trace:
            assert len(traced.entropies) == len(traced.proposal)
            assert all(0 <= entropy <= 1 for entropy in traced.entropies)
        assert all(traced.entropies == () for traced in other.trace), "nobody asked for it"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shortest": -1}, "shortest is -1, expected a whole number >= 0"),
        ({"longest": 2.5}, "longest is 2.5, expected a whole number >= 0"),
        ({"shortest": 9, "longest": 8}, "shortest is 9, expected at most longest, which is 8"),
        ({"smoothing": 1.5}, "smoothing is 1.5, expected a number from 0 to 1"),
        ({"stop_above": "high"}, "stop_above is 'high', expected a number from 0 to 1"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(fields, message: str):
    with pytest.raises(RequestError) as refusal:
        EntropyRule(**fields)
    assert str(refusal.value) == message


def test_a_request_that_cannot_keep_the_rule_is_refused(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        with pytest.raises(RequestError, match="longest is 17, expected at most 16"):
            decoder.submit([5, 6], draft_length=EntropyRule(longest=17))
        with pytest.raises(RequestError, match="drafter lookup has no entropy to choose a draft length by"):
            decoder.submit([5, 6], draft_length=EntropyRule(), drafter="lookup")
        request = decoder.submit([5, 6], draft_length=EntropyRule())
        with pytest.raises(RequestError, match="drafter suffix has no entropy"):
            request.draft(request.draft_length, "suffix")
