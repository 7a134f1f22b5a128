"""The draft length chooses itself: what pays by the measured costs, 0 where nothing does, and back again."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import numpy as np
import pytest
from trt_spec.runtime import Decoder, Request, SamplingParams
from trt_spec.runtime.lengths.by_costs import ByCosts
from trt_spec.runtime.lengths.chooser import Chooser, Pause
from trt_spec.runtime.lengths.controller import KEPT_ROUNDS, Controller, Unread
from trt_spec.runtime.lengths.costs import Costs, smoothed
from trt_spec.runtime.lengths.estimate import Estimate, expected_tokens
from trt_spec.runtime.requests.metrics import Beside, Outcome
from trt_spec.runtime.state.asked import Share
from trt_spec.runtime.state.shapes import line, read_shape
from trt_spec.tools.theory.lines import best_draft_length, tokens_per_round

from ...kit.bundles import Pair
from ...kit.costs import SIBLINGS, known_costs, table
from ...kit.scripts import target
from ..scripted import scripted_decoder

LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


def agreeing(share: float, until: int = 10**9, then: float = 0.0):
    """A draft that is right with this probability, the same for the same context."""

    def draft(context: Sequence[int]) -> int:
        right = random.Random(len(context)).random() < (share if len(context) < until else then)
        return target(context) if right else 255 - target(context)

    return draft


def caught_up(row: int) -> Unread:
    return Unread(0, 100)


def count(controller: Controller, live: Sequence[Chooser]) -> None:
    """As after a round of what they want."""
    controller.count(live, [one.wanted.length for one in live])


def proposed_lengths(decoder: Decoder, steps: int) -> list[int]:
    """Of each round of the only request."""
    found = []
    for _ in range(steps):
        decoder.step()
        assert decoder.last_frame is not None
        found.append(decoder.last_frame.lines[0].proposed.shape[1])
    return found


def test_an_estimate_follows_what_is_examined():
    estimate = Estimate(0.5, 1.0)
    assert estimate.acceptance == 0.5
    assert expected_tokens(estimate.levels, 2).tolist() == [1, 1.5, 1.75]
    for _ in range(100):
        estimate.observe(proposed=4, examined=5, accepted=4)
    assert estimate.acceptance == pytest.approx(0.8, abs=1e-4)
    assert expected_tokens(estimate.levels, 4)[4] == pytest.approx(tokens_per_round(0.8, 4), rel=0.02)
    for _ in range(100):
        estimate.observe(proposed=0, examined=0, accepted=0)
    assert estimate.acceptance == pytest.approx(0.8, abs=1e-4), "no round without proposals says anything of acceptance"
    assert expected_tokens(estimate.levels, 4)[4] == pytest.approx(1, abs=0.1), (
        "but of how often there is something to propose"
    )
    for _ in range(9):
        estimate.doubt()
    assert estimate.acceptance == pytest.approx(0.8, abs=1e-4), "doubt is no news"
    estimate.observe(proposed=1, examined=1, accepted=0)
    assert estimate.acceptance < 0.1, "but news weighs more"


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6, 0.8, 0.95])
def test_the_draft_length_is_what_theory_chooses_for_the_acceptance_seen(tmp_path: Path, alpha: float):
    with scripted_decoder(tmp_path, target, agreeing(alpha), costs=table()) as decoder:
        request = decoder.submit([1, 2, 3], LONG)
        chosen = proposed_lengths(decoder, 100)[40:]
        best = best_draft_length(request.speculation.acceptance, 0.2, 8)
        assert request.speculation.acceptance == pytest.approx(alpha, abs=0.15)
    assert abs(sorted(chosen)[len(chosen) // 2] - best) <= (1 if best < 5 else 2)


def test_a_draft_that_is_never_right_is_asked_ever_more_seldom(tmp_path: Path):
    with scripted_decoder(tmp_path, target, agreeing(0.0), costs=table()) as decoder:
        request = decoder.submit([1, 2, 3], LONG)
        lengths = proposed_lengths(decoder, 400)
    assert request.finished
    asked = [at for at, length in enumerate(lengths) if length]
    first = [at for at in asked if at < 16]
    assert len(first) <= 12, "it stops soon"
    gaps = [b - a for a, b in zip(asked[len(first) - 1 :], asked[len(first) :], strict=False)]
    assert Pause.FIRST < gaps[0] < 3 * Pause.FIRST
    assert max(gaps) == Pause.LONGEST + 1
    assert gaps == sorted(gaps)
    extra_ms = sum(0.2 * length for length in lengths)
    assert extra_ms < 0.03 * 400, "less than 3 % slower than decoding plainly"


def test_speculation_comes_back_when_the_draft_is_right_again(tmp_path: Path):
    with scripted_decoder(tmp_path, target, agreeing(0.0, until=100, then=1.0), costs=table()) as decoder:
        decoder.submit([1, 2, 3], LONG)
        lengths = proposed_lengths(decoder, 200)
    assert sum(length == 0 for length in lengths[:97]) > 80
    assert set(lengths[190:]) == {8}


def test_a_batch_shares_one_width_and_stops_speculating_where_it_does_not_pay(tmp_path: Path):
    """In eight rows a step costs 1.6 of the round's 1.0: only near certainty would pay."""
    with scripted_decoder(tmp_path, target, agreeing(0.6), costs=table(), max_batch=8) as decoder:
        alone = decoder.submit([1, 2, 3], LONG)
        assert min(proposed_lengths(decoder, 20)[10:]) > 0
        others = [decoder.submit([row, 2, 3], LONG) for row in range(7)]
        together = proposed_lengths(decoder, 60)[1:]
        assert sum(length == 0 for length in together) > 50
        for request in others:
            decoder.cancel(request)
        decoder.step()
        assert sum(length > 0 for length in proposed_lengths(decoder, 30)) > 15
        assert not alone.finished


def test_a_fixed_length_beside_it_is_kept_and_its_width_is_free(tmp_path: Path):
    with scripted_decoder(tmp_path, target, agreeing(0.9), costs=table(), max_batch=2) as decoder:
        fixed = decoder.submit([1, 2, 3], LONG, draft_length=4)
        auto = decoder.submit([4, 2, 3], LONG)
        for _ in range(20):
            decoder.step()
        assert {outcome.proposed for outcome in fixed.speculation.outcomes} == {4}
        assert max(outcome.proposed for outcome in auto.speculation.outcomes) >= 4


def test_mixed_takes_the_source_that_yields_most_for_its_price(tmp_path: Path):
    """The text repeats from some point on: until then only the draft is right, from then on a copy costs less."""

    def repeating(context: Sequence[int]) -> int:
        return target(context) if len(context) < 100 else context[-20]

    def draft(context: Sequence[int]) -> int:
        return repeating(context)

    with scripted_decoder(tmp_path, repeating, draft, costs=table()) as decoder:
        request = decoder.submit([1, 2, 3], LONG, drafter="mixed")
        chosen = []
        while decoder.step():
            chosen.append((request.length, decoder.live[0].chooser.wanted.drafter if decoder.live else None))
    early = [name for length, name in chosen if 20 < length < 100]
    late = [name for length, name in chosen if length > 200]
    assert early.count("model") > 0.7 * len(early)
    assert late.count("suffix") > 0.7 * len(late)
    reference = [1, 2, 3]
    while len(reference) < 403:
        reference.append(repeating(reference))
    assert request.token_ids == reference[3:]


def test_a_length_may_become_open_and_fixed_again_between_rounds(tmp_path: Path):
    with scripted_decoder(tmp_path, target, agreeing(1.0), costs=table()) as decoder:
        request = decoder.submit([1, 2, 3], LONG, draft_length=0)
        assert proposed_lengths(decoder, 5) == [0] * 5
        request.draft("auto", request.drafter)
        assert max(proposed_lengths(decoder, 10)) == 8
        request.draft(1, request.drafter)
        assert proposed_lengths(decoder, 3) == [1] * 3


def regret(costs: Costs, true: Costs, alpha: float) -> float:
    """How much slower the K is that these costs recommend than the best one, by the true costs."""
    longest = costs.longest
    rates = np.array([tokens_per_round(alpha, k) for k in range(longest + 1)])
    chosen = int((rates / costs.round_times("model", 1)).argmax())
    truly = rates / true.round_times("model", 1)
    return float(1 - truly[chosen] / truly.max())


def test_a_noisy_table_of_costs_does_not_mislead():
    """Each time is off by up to 12 %. Taken as they are, such times cost three times as much speed as smoothed ones."""
    lengths, choose = (0, 1, 2, 3, 4, 5, 6, 8), random.Random(0)
    true = table(batches=(1,), draft_lengths=lengths, model=[[1.0, *(1.05 + 0.12 * k for k in lengths[1:])]])
    smooth, raw = [], []
    for _ in range(200):
        noisy = [[ms * choose.uniform(0.88, 1.12) for ms in true.round_ms["model"][0]]]
        costs = table(batches=(1,), draft_lengths=lengths, model=noisy)
        alpha = choose.uniform(0.5, 0.9)
        smooth.append(regret(costs, true, alpha))
        with patch("trt_spec.runtime.lengths.costs.smoothed", lambda k, ms: np.interp(range(1, 9), k, ms)):
            raw.append(regret(costs, true, alpha))
    assert fmean(smooth) < 0.02
    assert fmean(smooth) < fmean(raw) / 1.5


def test_times_on_a_line_stay_as_they_are_and_no_time_falls():
    assert smoothed(np.array([1, 2, 4, 8]), np.array([1.2, 1.4, 1.8, 2.6])) == pytest.approx(
        [1 + 0.2 * k for k in range(1, 9)]
    )
    assert smoothed(np.array([3]), np.array([2.0]))[-1] == pytest.approx(2.0)
    wild = smoothed(np.array([1, 2, 3, 4]), np.array([2.0, 1.0, 3.0, 1.5]))
    assert wild == sorted(wild)
    assert smoothed(np.array([], dtype=np.int64), np.array([])) == []


def test_the_next_request_expects_what_the_last_ones_got(tmp_path: Path):
    """Speculation that never paid is not tried at length again for each request, until it is forgotten."""
    with scripted_decoder(tmp_path, target, agreeing(0.0), costs=table()) as decoder:

        def proposals_at_first() -> int:
            request = decoder.submit([1, 2, 3], SamplingParams(max_new_tokens=15, ignore_eos=True))
            while decoder.step():
                pass
            return request.speculation.proposed

        first = proposals_at_first()
        for _ in range(5):
            later = proposals_at_first()
        assert first >= 3
        assert later < first / 2
        decoder.forget_outputs()
        assert proposals_at_first() == first


def test_what_was_learned_with_an_adapter_goes_when_it_does():
    class Adapter:
        pass

    controller, adapter = Controller(table(acceptance=0.9), 8), Adapter()
    name = next(iter(controller.costs.acceptance))
    usual = controller._usually(name, None)
    chooser = controller.begin([name], adapter=adapter)
    for _ in range(50):
        chooser.observe(name, Outcome(4, 0, 1), ())
    controller.ended(chooser)
    with_it = controller.begin([name], adapter=adapter)
    assert (
        with_it.estimates[name].acceptance
        < 0.5
        < usual.acceptance
        == controller.begin([name]).estimates[name].acceptance
    )
    del adapter, chooser, with_it
    assert len(controller._with_adapters) == 0


@pytest.mark.parametrize("drafters", [["model"], ["model", "suffix"]])
def test_to_choose_twice_for_one_round_changes_nothing(drafters: list[str]):
    """Where a round that ran ahead has to end first, the next one is chosen again: pauses count rounds, not choices."""

    def lengths(times: int) -> list[tuple[int, str]]:
        controller = Controller(table(acceptance=0.0), 8)
        chooser, found = controller.begin(drafters), []
        for _ in range(3 * Pause.LONGEST):
            for _ in range(times):
                controller.choose([chooser], caught_up)
            wanted = chooser.wanted
            found.append((wanted.length, wanted.drafter))
            count(controller, [chooser])
            chooser.observe(wanted.drafter, Outcome(wanted.length, 0, 1), ())
        return found

    once = lengths(1)
    assert 0 < sum(length > 0 for length, _ in once) < 10
    assert lengths(2) == once


def simulated_ms(
    times: Sequence[float], right: Sequence[bool], choose: Callable[[], int], learn=lambda *_: None
) -> float:
    """Return how long a text takes of which the draft has these tokens right, if K is chosen for each round."""
    at, taken = 0, 0.0
    while at < len(right):
        k = choose()
        stood = next((n for n in range(k) if at + n >= len(right) or not right[at + n]), k)
        at, taken = at + stood + 1, taken + times[k]
        learn(Outcome(k, stood, stood + 1))
    return taken


@pytest.mark.parametrize(
    ("after_wrong", "after_right"), [*((a, a) for a in (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)), (0.35, 0.85)]
)
def test_a_length_that_is_learned_is_nearly_as_good_as_the_best_fixed_one(after_wrong: float, after_right: float):
    """Requests of 256 tokens, each alone; costs as on two cores, where the first proposal costs most."""
    costs = table(batches=(1,), draft_lengths=range(9), model=[[1.0, *(1.15 + 0.1 * k for k in range(1, 9))]])
    times, draw = costs.round_times("model", 1), random.Random(11)
    texts: list[list[bool]] = [[] for _ in range(12)]
    for text in texts:
        while len(text) < 256:
            text.append(draw.random() < (after_right if text and text[-1] else after_wrong))
    best = min(sum(simulated_ms(times, text, lambda k=k: k) for text in texts) for k in range(9))
    plain = sum(len(text) * times[0] for text in texts)

    def learned(text: Sequence[bool]) -> float:
        controller = Controller(costs, 8)
        chooser = controller.begin(["model"])

        def choose() -> int:
            controller.choose([chooser], caught_up)
            return chooser.wanted.length

        def learn(outcome: Outcome) -> None:
            count(controller, [chooser])
            chooser.observe(chooser.wanted.drafter, outcome, ())

        return simulated_ms(times, text, choose, learn)

    found = sum(map(learned, texts))
    assert found <= best / 0.95
    assert found <= plain / 0.97


# Many requests.

CROWDED = {  # by batch: milliseconds of a round of K = 0, 1, 2, 4, 8 and 16 on two cores, where the target is small
    1: (1.99, 2.82, 3.25, 3.90, 5.25, 7.80),
    2: (2.64, 3.33, 4.01, 5.15, 7.19, 11.48),
    4: (3.05, 4.58, 5.33, 7.42, 10.98, 18.27),
    8: (4.16, 6.33, 8.48, 12.16, 20.31, 35.71),
}
READING = (0.5, 0.018)  # of the draft: a call, and each token


@dataclass(eq=False)
class Decoding:
    right: Sequence[bool]  # which tokens the draft has right
    unread: int  # tokens that the draft has to read before it can propose
    chooser: ByCosts | None
    at: int = 0

    @property
    def behind(self) -> Unread:
        return Unread(self.unread, len(self.right) - self.at)

    def go_on(self, k: int) -> int:
        """Take a round of K proposals; return how many of them stood."""
        ahead = self.right[self.at : self.at + k]
        stood = next((n for n, right in enumerate(ahead) if not right), len(ahead))
        self.at, self.unread = self.at + stood + 1, 0 if k else self.unread + 1
        return stood


def crowded_costs() -> Costs:
    times = tuple(CROWDED.values())
    return table(tuple(CROWDED), (0, 1, 2, 4, 8, 16), 0.65, reading_ms={"model": READING}, model=times)


def crowd_ms(costs: Costs, batch: int, texts: Sequence[Sequence[bool]], prompt: int, k: int | None) -> float:
    """Return how long all texts take, so many at a time, with a fixed K or with the controller's."""
    controller, waiting, live, taken = Controller(costs, 16), list(texts), list[Decoding](), 0.0
    times = {some: costs.round_times("model", some) for some in range(1, batch + 1)}
    call_ms, token_ms = costs.reading_ms["model"]
    while waiting or live:
        while waiting and len(live) < batch:
            live.append(Decoding(waiting.pop(), prompt, controller.begin(["model"]) if k is None else None))
        choosers = [one.chooser for one in live if one.chooser]
        if choosers:
            controller.choose(choosers, lambda row, live=live: live[row].behind)
            count(controller, choosers)
        lengths = [one.chooser.wanted.length if one.chooser else k or 0 for one in live]
        taken += times[len(live)][max(lengths)]
        for one, length in zip(live, lengths, strict=True):
            if length and one.unread:
                taken += call_ms + token_ms * one.unread
            stood = one.go_on(length)
            if one.chooser:
                one.chooser.observe(one.chooser.wanted.drafter, Outcome(length, stood, stood + 1), ())
                if one.at >= len(one.right):
                    controller.ended(one.chooser)
        live = [one for one in live if one.at < len(one.right)]
    return taken


@pytest.mark.parametrize("prompt", [23, 900])
@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("acceptance", [0.1, 0.45, 0.6, 0.75])
def test_a_crowd_is_nearly_as_fast_as_with_the_best_fixed_length_and_never_much_slower_than_without_proposals(
    acceptance: float, batch: int, prompt: int
):
    """What the draft has to read first counts: prompts, and what was written while nobody proposed."""
    costs = crowded_costs()
    draw = random.Random(7)
    shares = [min(0.95, max(0.02, draw.gauss(acceptance, 0.1))) for _ in range(16 * batch)]
    texts = [[draw.random() < share for _ in range(64)] for share in shares]
    found = crowd_ms(costs, batch, texts, prompt, None)
    fixed = [crowd_ms(costs, batch, texts, prompt, k) for k in (0, 1, 2, 3, 4, 6, 8)]
    assert found <= fixed[0] / 0.97
    assert found <= min(fixed) / 0.95


def test_a_draft_reads_a_long_prompt_only_if_enough_is_left_to_write():
    costs = table(batches=(1,), acceptance=0.8, reading_ms={"model": (0.1, 0.01)})

    def first_length(unread: int, remaining: int) -> int:
        controller = Controller(costs, 8)
        chooser = controller.begin(["model"])
        controller.choose([chooser], lambda row: Unread(unread, remaining))
        return chooser.wanted.length

    assert first_length(0, 4) == first_length(20, 400) == first_length(500, 400) > 0
    assert first_length(500, 4) == 0
    assert first_length(5000, 400) == 0


def test_a_trial_waits_until_its_price_is_small_beside_the_rounds_before_it():
    """Two milliseconds to read what was written meanwhile, where a round takes one."""
    controller = Controller(table(batches=(1,), acceptance=0.1, reading_ms={"model": (2.0, 0.0)}), 8)
    chooser, asked = controller.begin(["model"]), []
    for at in range(1500):
        controller.choose([chooser], lambda row: Unread(1, 400))
        wanted = chooser.wanted
        count(controller, [chooser])
        chooser.observe(wanted.drafter, Outcome(wanted.length, 0, 1), ())
        if wanted.length:
            asked.append(at)
    assert len(asked) >= 5, "it is tried again"
    assert min(b - a for a, b in pairwise([-1, *asked])) > 100
    assert len(asked) * 2.4 < 0.015 * 1500


def test_trials_come_though_all_that_is_written_meanwhile_has_to_be_read():
    """Of eight rows few catch up, so that it stays cheap however much they lack."""
    controller = Controller(crowded_costs(), 16)
    live = [Decoding([False] * 10_000, 23, controller.begin(["model"])) for _ in range(8)]
    choosers, trials, read_ms = [one.chooser for one in live], 0, 0.0
    for _ in range(3000):
        controller.choose(choosers, lambda row: live[row].behind)
        count(controller, choosers)
        lengths = [one.wanted.length for one in choosers]
        trials += max(lengths) > 0
        for one, length in zip(live, lengths, strict=True):
            read_ms += (READING[0] + READING[1] * one.unread) * (length > 0)
            one.go_on(length)
            one.chooser.observe(one.chooser.wanted.drafter, Outcome(length, 0, 1), ())
    assert trials > 10
    assert read_ms < 0.02 * 3000 * CROWDED[8][0]


def test_what_there_is_to_read_has_its_price_beside_wide_rows_of_a_fixed_length_as_well():
    costs = replace(crowded_costs(), acceptance={"model": 0.1})

    def chosen(unread: int, pinned: int) -> int:
        controller = Controller(costs, 16)
        free = [controller.begin(["model"]) for _ in range(7)]
        controller.choose([*free, Chooser(Share.of(line(pinned), "model"))], lambda row: Unread(unread, 400))
        return free[0].wanted.length

    assert chosen(0, pinned=0) == 0
    assert chosen(0, pinned=4) == chosen(200, pinned=4) == 4, "the width is paid for, and reading is cheap beside it"
    assert chosen(900, pinned=4) == 0


def test_a_choice_that_pays_is_kept_for_some_rounds_unless_more_may_be_had_or_others_are_live():
    controller = Controller(table(batches=(1,), acceptance=0.6), 8)
    chooser = controller.begin(["model"])

    def lengths(accepted: int | None, rounds: int) -> list[int]:
        """What it chooses where so many proposals stand in each round; None: all."""
        found = []
        for _ in range(rounds):
            length = wanted(controller, chooser).length
            count(controller, [chooser])
            stood = length if accepted is None else accepted
            chooser.observe("model", Outcome(length, stood, stood + 1), ())
            found.append(length)
        return found

    falling = lengths(0, 2 * KEPT_ROUNDS)
    assert len(set(falling[:KEPT_ROUNDS])) == len(set(falling[KEPT_ROUNDS:])) == 1
    assert falling[0] > falling[-1] > 0
    rising = lengths(None, 40)
    changes = [at for at, (a, b) in enumerate(pairwise(rising)) if a != b]
    assert min(b - a for a, b in pairwise(changes)) < KEPT_ROUNDS, "all stood"
    length = wanted(controller, chooser).length
    for _ in range(20):
        chooser.observe("model", Outcome(length, 0, 1), ())
    assert wanted(controller, chooser).length == length
    controller.choose([chooser, controller.begin(["model"])], caught_up)
    assert chooser.wanted.length < length, "another is live, so it chooses for both"


def test_a_trial_that_pays_for_itself_is_followed_by_another():
    def tried_again(stood: int) -> bool:
        controller = Controller(table(batches=(1,), acceptance=0.01), 8)
        chooser = controller.begin(["model"])
        while not wanted(controller, chooser).length:
            count(controller, [chooser])
        count(controller, [chooser])
        chooser.observe("model", Outcome(2, stood, stood + 1), ())
        chooser.estimates["model"] = Estimate(0.01, 1.0)  # whatever it has learned of that
        return wanted(controller, chooser).length > 0

    assert not tried_again(0)
    assert tried_again(1), "a round of two proposals takes 1.4 of the time of one without"


def test_a_trial_goes_on_for_those_who_have_read_when_another_joins_that_has_not():
    controller = Controller(table(batches=(1,), acceptance=0.01), 8)
    chooser, late = controller.begin(["model"]), controller.begin(["model"])
    while not wanted(controller, chooser).length:
        count(controller, [chooser])
    count(controller, [chooser])
    chooser.observe("model", Outcome(2, 2, 3), ())
    controller.choose([chooser, late], lambda row: Unread(9000 * row, 400))
    assert (chooser.wanted.length, late.wanted.length) == (2, 0)


def test_a_trial_that_waits_for_a_round_in_flight_is_not_taken_for_made():
    """That one had no proposals: it was launched before the choice."""
    controller = Controller(table(batches=(1,), acceptance=0.01), 8)
    chooser = controller.begin(["model"])
    before = wanted(controller, chooser).length
    while not (length := wanted(controller, chooser).length):
        count(controller, [chooser])
    assert (before, length) == (0, 2)
    for _ in range(2):
        controller.count([chooser], [0])
        assert wanted(controller, chooser).length == 2
    count(controller, [chooser])
    assert wanted(controller, chooser).length == 0


def test_what_stood_in_earlier_rounds_makes_no_later_one_a_trial():
    """Only what the last round, a trial, has shown."""
    controller = Controller(table(batches=(1,), acceptance=0.01), 8)
    chooser = controller.begin(["model"])
    never, always = 0.01, 0.99

    def chosen(acceptance: float) -> int:
        chooser.estimates["model"], chooser.has_learned = Estimate(acceptance, 1.0), True
        return wanted(controller, chooser).length

    def go_on(drafter: str, stood: int) -> None:
        count(controller, [chooser])
        chooser.observe(drafter, Outcome(stood, stood, stood + 1), ())

    while not chosen(never):
        count(controller, [chooser])
    go_on("model", 2)
    assert chosen(never) == 2, "the trial went well, and is followed by another"
    go_on("none", 0)
    assert chosen(never) == 0, "for which the draft had nothing"
    while not chosen(never):
        count(controller, [chooser])
    go_on("model", 2)
    assert chosen(always) == 8, "it pays"
    go_on("model", 8)
    chosen(always)
    go_on("model", 8)
    for _ in range(KEPT_ROUNDS):
        count(controller, [chooser])
    chooser.accepted = 8
    assert chosen(never) == 0, "that was no trial"


def test_in_a_crowd_those_to_come_have_to_read_as_much_as_those_who_have_read():
    """A millisecond for each token of a prompt."""
    costs = replace(crowded_costs(), acceptance={"model": 0.75}, reading_ms={"model": (0.0, 1.0)})

    def chosen(prompt: int, batch: int) -> int:
        controller = Controller(costs, 16)
        live = [controller.begin(["model"]) for _ in range(batch)]
        controller.choose(live, lambda row: Unread(prompt, 40))
        for chooser in live:  # as if it had been made to propose
            chooser.has_learned = True
        for _ in range(KEPT_ROUNDS):
            count(controller, live)
        controller.choose(live, lambda row: Unread(0, 40))
        return live[0].wanted.length

    assert chosen(0, batch=8) == chosen(1, batch=8) > 0
    assert chosen(40, batch=8) == 0
    assert chosen(40, batch=1) > 0, "alone it goes on with what was read"


def test_what_a_round_in_flight_has_shown_counts_where_nothing_paid_before():
    controller = Controller(table(batches=(1,), acceptance=0.1), 8)
    chooser = controller.begin(["model"])
    controller.choose([chooser], caught_up)
    assert chooser.wanted.length == 0
    for _ in range(20):  # of a round that was launched before
        chooser.observe("model", Outcome(4, 4, 5), ())
    controller.choose([chooser], caught_up)
    assert chooser.wanted.length > 0


def test_a_request_that_proposed_nothing_confirms_no_expectation():
    controller = Controller(table(batches=(1,)), 8)
    for _ in range(50):
        controller.ended(controller.begin(["model"]))
    seen = controller.begin(["model"])
    for _ in range(50):
        seen.observe("model", Outcome(2, 2, 3), ())
    controller.ended(seen)
    assert controller.begin(["model"]).estimates["model"].acceptance > 0.9


# Siblings.


def wanted(controller: Controller, chooser: ByCosts) -> Share:
    controller.choose([chooser], caught_up)
    return chooser.wanted


@pytest.mark.parametrize(
    ("each_ms", "most", "expected"), [(0.0, 2, 2), (0.02, 2, 2), (0.0, 1, 1), (0.0, 0, 0), (1.0, 2, 0)]
)
def test_siblings_are_hung_where_they_pay_as_many_as_the_request_may_have(each_ms: float, most: int, expected: int):
    controller = Controller(table(beside=SIBLINGS, each_ms=each_ms), 8)
    found = wanted(controller, controller.begin(["model"], most))
    assert (found.drafter, found.shape.beyond) == ("model", expected)
    assert found.length > 0


def test_a_round_has_the_length_and_the_siblings_of_most_tokens_per_millisecond():
    for alpha in (0.2, 0.5, 0.8):
        for each_ms in (0.0, 0.05, 0.2):
            costs = table(acceptance=alpha, beside=SIBLINGS, each_ms=each_ms)
            controller = Controller(costs, 8)
            found = wanted(controller, controller.begin(["model"], 2))
            levels = controller.begin(["model"]).estimates["model"].levels
            alpha = levels[0] / 64  # as coarse as it is chosen by
            rates = {
                (k, count): (tokens_per_round(alpha, k) + (1 - alpha**k) * ({0: 0.0} | SIBLINGS)[count])
                / (costs.round_times("model", 1)[k] + each_ms * count)
                for k in range(1, 9)
                for count in (0, 1, 2)
            }
            assert rates[found.length, found.shape.beyond] == pytest.approx(max(rates.values()))


def test_siblings_that_never_stand_are_left_out_and_tried_again_later():
    controller = Controller(table(beside=SIBLINGS, each_ms=0.05), 8)
    chooser = controller.begin(["model"], 2)
    assert wanted(controller, chooser).shape.beyond
    for _ in range(60):
        count(controller, [chooser])
        chooser.observe("model", Outcome(4, 2, 3), (), Beside(read_shape("4+2"), 0))
    assert not wanted(controller, chooser).shape.beyond
    controller.ended(chooser)
    assert not wanted(controller, controller.begin(["model"], 2)).shape.beyond, (
        "the next request expects no more of them"
    )
    for _ in range(300):
        count(controller, [chooser])
    assert wanted(controller, chooser).shape.beyond


def test_a_sibling_that_stands_says_nothing_good_of_its_line():
    """The line fell where the sibling stands."""
    fell, replaced = (Controller(table(beside=SIBLINGS), 8).begin(["model"], 2) for _ in range(2))
    for _ in range(20):
        fell.observe("model", Outcome(4, 2, 3), (), Beside(read_shape("4+2"), 0))
        replaced.observe("model", Outcome(3, 3, 4), (), Beside(read_shape("4+2"), 1))
    assert fell.estimates["model"].acceptance == pytest.approx(replaced.estimates["model"].acceptance)
    assert fell.estimates["model"].gain < 0.5 < 1.5 < replaced.estimates["model"].gain


def test_rounds_of_auto_have_siblings_where_the_request_may_have_them(llama: Pair):
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=60, ignore_eos=True)
    with known_costs(table(beside=SIBLINGS)), Decoder.open(llama.bundle) as decoder:

        def run(params: SamplingParams, drafter: str) -> Request:
            request = decoder.submit([5, 6, 7], params, draft_length="auto", drafter=drafter, trace=True)
            while decoder.step():
                pass
            return request

        request = run(params, "model")
        assert request.drafting.beyond == 2
        assert max(len(one.siblings) for one in request.trace) == 2
        assert 0 < request.speculation.accepted_beside < 1
        assert run(replace(params, lenience=0.5), "model").speculation.accepted_beside is not None
        other = run(params, "lookup")
        assert other.speculation.proposed
        assert other.speculation.accepted_beside is None


# Trees.


@pytest.mark.parametrize(
    ("tokens", "each_ms", "most", "growing", "grown"),
    [
        (2.5, 0.05, 4, True, True),
        (2.5, 0.05, 3, True, False),  # more than the request may have
        (2.5, 0.05, 4, False, False),  # the draft cannot grow it here
        (2.5, 2.0, 4, True, False),  # it costs more than it gives
        (0.0, 0.05, 4, True, False),
    ],
)
def test_a_tree_is_grown_where_it_pays_and_the_request_may_have_it(
    tokens: float, each_ms: float, most: int, growing: bool, grown: bool
):
    controller = Controller(table(beside=SIBLINGS | {"4/8": tokens}, each_ms=each_ms), 8, ["model"] * growing)
    found = wanted(controller, controller.begin(["model"], most))
    assert (str(found.shape) == "4/8") == grown


def test_what_the_engine_has_no_room_for_behind_a_longer_line_of_another_is_not_chosen():
    costs = table(beside=SIBLINGS | {"4/8": 3.0}, each_ms=0.001)
    for most, other, grown in ((8, 4, True), (8, 5, False), (9, 5, True)):
        controller = Controller(costs, 8, ["model"], most)
        chooser, fixed = controller.begin(["model"], 4), Chooser(Share.of(line(other), "model"))
        controller.choose([chooser, fixed], caught_up)
        assert (str(chooser.wanted.shape) == "4/8") == grown


def test_a_tree_is_chosen_exactly_where_it_gives_most_tokens_per_millisecond():
    seen = set()
    for stood in np.linspace(0.2, 4, 40):
        costs = table(beside=SIBLINGS | {"4/8": stood}, each_ms=0.1)
        controller = Controller(costs, 8, ["model"])
        levels = controller.begin(["model"]).estimates["model"].levels
        alpha, times = levels[0] / 64, costs.round_times("model", 1)
        rates = {
            (k, count): (tokens_per_round(alpha, k) + (1 - alpha**k) * ({0: 0.0} | SIBLINGS)[count])
            / (times[k] + 0.1 * count)
            for k in range(1, 9)
            for count in (0, 1, 2)
        }
        rates[4, "4/8"] = (tokens_per_round(alpha, 4) + (1 - alpha**4) * stood) / (times[4] + 0.1 * 4)
        found = wanted(controller, controller.begin(["model"], 4))
        shape = "4/8" if str(found.shape) == "4/8" else found.shape.beyond
        assert rates[found.length, shape] == pytest.approx(max(rates.values()))
        seen.add(shape)
    assert "4/8" in seen
    assert len(seen) > 1, "neither always pays"


def test_branches_that_never_stand_are_left_out_and_say_nothing_of_the_line():
    controller = Controller(table(beside={"4/8": 3.0}, each_ms=0.001), 8, ["model"])
    chooser = controller.begin(["model"], 4)
    assert wanted(controller, chooser).shape.beyond
    acceptance = chooser.estimates["model"].acceptance
    for _ in range(60):
        count(controller, [chooser])
        chooser.observe("model", Outcome(4, 2, 3), (), Beside(read_shape("4/8"), 0))
    assert not wanted(controller, chooser).shape.beyond
    other = controller.begin(["model"], 4)
    for _ in range(60):  # the line fell at its third place as well, and two tokens of a branch stood there
        other.observe("model", Outcome(4, 4, 5), (), Beside(read_shape("4/8"), 2))
    assert other.estimates["model"].acceptance == pytest.approx(chooser.estimates["model"].acceptance)
    assert other.estimates["model"].acceptance > acceptance
    assert wanted(controller, other).shape.beyond


def test_rounds_of_auto_grow_trees_and_count_what_accepted_beside_their_line(llama: Pair):
    costs = table(beside={"4/8": 3.0}, each_ms=0.001)
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=60, ignore_eos=True)
    with known_costs(costs), Decoder.open(llama.bundle) as decoder:
        for rule in ("coupled", "rejection"):
            request = decoder.submit([5, 6, 7], replace(params, rule=rule), draft_length="auto", trace=True)
            while decoder.step():
                pass
            grown = [one for one in request.trace if any(sibling.after is not None for sibling in one.siblings)]
            assert grown
            [shape] = {one.shape for one in request.speculation.beside}
            assert shape == read_shape("4/8")
            assert 0 < request.speculation.accepted_beside < 4
            stood = sum(sibling.stands for one in request.trace for sibling in one.siblings)
            counted = sum(one.accepted * rounds for one, rounds in request.speculation.beside.items())
            assert abs(stood - counted) <= 4, "but for a round that a text ends in"
