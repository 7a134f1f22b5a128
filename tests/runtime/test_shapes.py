"""Whatever shape proposals have, texts and log-probs are those without; what cannot be is refused."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, permutations
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from trt_spec.engines import EngineError
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import Decoder, EntropyRule, Output, RequestError, SamplingParams, Speculation
from trt_spec.runtime.drafters import DRAFTERS
from trt_spec.runtime.scheduling import capture
from trt_spec.runtime.state.shapes import MOST_LINES, read_shape
from trt_spec.runtime.state.tree import Tree
from trt_spec.tools.prompts.shipped import bench_prompts

from ..kit.bundles import Pair
from ..kit.prompts import REPEATS, random_prompts
from ..kit.recorder import Recorder
from ..kit.rules import RULES, SAMPLED
from .scripted import ScriptedEngine, scripted_decoder

LENIENT = {"lenient greedy": SamplingParams(max_new_tokens=48, ignore_eos=True, lenience=0.2)}

Choice = tuple[str, int | str]  # a drafter and a draft length
COMBS = ("1+1", "1+3", "3+3", "4+12", "16+48", "5+0")
TREES = ("1/2", "4/12", "3x2x1", "2x2x2x2", "1x1x3", "16/64", "4x4", "5/5")
LINES = ("model+random", "random+model", "lookup+model", "suffix+suffix+lookup+lookup", "random+suffix+model+lookup")
ALL: dict[str, list[Choice]] = {
    "combs": [(drafter, comb) for drafter in ("model", "random") for comb in COMBS],
    "trees": [("model", tree) for tree in TREES],
    "lines": [(drafter, length) for drafter in LINES for length in (1, 4)],
}
SHAPES: dict[str, Choice] = {"comb": ("model", "3+5"), "tree": ("model", "3x2x2"), "lines": ("random+model", 3)}


def run(decoder: Decoder, *asked: tuple[Sequence[int], SamplingParams, Choice]) -> list[list[int]]:
    """Decode these requests together until the first has ended, and return their tokens so far."""
    requests = [
        decoder.submit(prompt, params, drafter=drafter, draft_length=length)
        for prompt, params, (drafter, length) in asked
    ]
    while not requests[0].finished:
        decoder.step()
    for request in requests[1:]:
        decoder.cancel(request)
    decoder.step()
    return [request.token_ids for request in requests]


@pytest.mark.parametrize(("family", "rules"), [("llama", ("greedy", "coupled")), ("gemma2", ("coupled", "greedy"))])
def test_the_text_is_that_of_plain_decoding(pairs, family: str, rules: tuple[str, str]):
    """Each shape under each rule, for one family or the other, and in a batch or alone by turns."""
    prompts = [*random_prompts(64, [2, 5, 9, 23], seed=8), [7], REPEATS]
    with Decoder.open(pairs(family).bundle) as decoder:
        expected = {
            rule: [one.token_ids for one in decoder.generate(prompts, RULES[rule], draft_length=0)] for rule in rules
        }
        for kind, asked in ALL.items():
            for (drafter, length), rule in zip(asked, cycle(rules)):
                for together in (prompts, prompts[-1:]):
                    found = decoder.generate(together, RULES[rule], draft_length=length, drafter=drafter)
                    tokens = [one.token_ids for one in found]
                    assert tokens == expected[rule][-len(together) :], f"{rule}, {drafter}, {length}"
            assert decoder.speculation.accepted, kind


def test_a_row_keeps_nothing_of_siblings_that_were_more_than_any_row_has_now(llama: Pair):
    """Rounds of as many proposals: of three beside one token, then of one beside each of three."""
    with Decoder.open(llama.bundle) as decoder:
        requests = [decoder.submit([5 + i, 9], SAMPLED, drafter="random", draft_length=4) for i in range(2)]
        for shapes in ((4, 4), ("1+3", 4), (4, "3+3")):
            for request, shape in zip(requests, shapes, strict=True):
                request.draft(shape, "random")
            decoder.step()
        assert not any(request.finished for request in requests)
        for request in requests:
            decoder.cancel(request)


OWN = [("model", 3), ("model", "3+2"), ("model", "5+5"), ("model", "3/7"), ("model", "2x2x1"), ("random+model", 3)]
BESIDE = [
    ("none", 0),
    ("model", 7),
    ("model", "5+4"),
    ("random", "2+6"),
    ("model+lookup", 3),
    ("model+random+lookup", 16),
    ("model", "5/20"),
    ("model", "1/3"),
    *((drafter, 7) for drafter in ("lookup", "cascade", "ngram")),
]
NEIGHBOURS = [
    replace(RULES["greedy"], max_new_tokens=60),
    replace(RULES["coupled"], max_new_tokens=60, temperature=2.0, logprobs=3),
    replace(RULES["rejection"], max_new_tokens=60, temperature=0.5, top_k=3, repetition_penalty=2.0),
]


@pytest.mark.parametrize("rule", RULES | LENIENT)
def test_no_request_depends_on_what_its_neighbours_propose(llama: Pair, rule: str):
    """Be they lines, combs, several lines, or other trees, deeper or not, and whatever else they ask for.

    Each shape is beside each other one, under a rule or two; each rule meets all of both.
    """
    mine, other, params = [5, 6, 7, 5, 6, 7], [9, 8, 7, 9, 8, 7], (RULES | LENIENT)[rule]
    first = [*(RULES | LENIENT)].index(rule)
    with Decoder.open(llama.bundle) as decoder:
        for i, own in enumerate(OWN):
            [alone] = run(decoder, (mine, params, own))
            for turn in range(3):
                beside, neighbour = BESIDE[(first + i + 4 * turn) % len(BESIDE)], NEIGHBOURS[(i + turn) % 3]
                found, _ = run(decoder, (mine, params, own), (other, neighbour, beside))
                assert found == alone, f"{own} beside {beside}, {neighbour.rule}"


def test_where_a_lenient_greedy_text_has_siblings_depends_on_no_neighbour(drafts: Pair):
    """Its text depends on them, so they are where they are when it is alone."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, lenience=0.1)
    with Decoder.open(drafts.bundle) as decoder:
        for prompt in random_prompts(64, [6] * 10, seed=1):
            own = prompt, params, ("model2", "3+1")
            [alone] = run(decoder, own)
            other = [9, 8, 7, 9, 8, 7], replace(params, max_new_tokens=90), ("model2", "2+6")
            assert run(decoder, own, other)[0] == alone


@pytest.mark.parametrize("lenience", [1.0, 0.3])
def test_a_line_beside_a_comb_keeps_what_it_keeps_alone(llama: Pair, lenience: float):
    """Whatever its drafter is, and though a lenient line keeps what the target would not have picked."""
    params = replace(RULES["greedy"], lenience=lenience, max_new_tokens=60)
    for drafter in ("model", "lookup"):
        found = []
        for beside in (0, "4+6"):
            with Decoder.open(llama.bundle) as decoder:
                request = decoder.submit([3, 4, 5, 3, 4, 5], params, draft_length=3, drafter=drafter)
                decoder.submit([9, 8], replace(RULES["greedy"], max_new_tokens=200), draft_length=beside)
                while not request.finished:
                    decoder.step()
            found.append((request.token_ids, request.speculation.accepted))
        assert found[0] == found[1]
        assert found[0][1], "something is kept"


@pytest.mark.parametrize("rule", RULES)
def test_a_tree_and_a_cascade_beside_it_propose_what_they_propose_alone(llama: Pair, rule: str):
    params = replace(RULES[rule], max_new_tokens=40)
    settings = [([5, 6, 7, 5, 6, 7], "4/12", "model"), ([9, 8, 7, 9, 8, 7], 6, "cascade")]

    def together(settings: Sequence[tuple[Sequence[int], str | int, str]]) -> list[tuple[list[int], int, int]]:
        with Decoder.open(llama.bundle) as decoder:
            requests = [decoder.submit(own, params, draft_length=k, drafter=name) for own, k, name in settings]
            while decoder.step():
                pass
        return [(one.token_ids, one.speculation.proposed, one.speculation.accepted) for one in requests]

    alone = [together([one])[0] for one in settings]
    assert together(settings) == alone
    assert all(accepted for _, _, accepted in alone)


def test_a_tree_counts_what_it_counts_alone_beside_several_lines(llama: Pair):
    params = replace(RULES["coupled"], max_new_tokens=60)
    found = []
    for beside, drafter in ((3, "model"), (3, "model+lookup")):
        with Decoder.open(llama.bundle) as decoder:
            decoder.submit([9, 8, 7], replace(params, max_new_tokens=200), draft_length=beside, drafter=drafter)
            request = decoder.submit([3, 4, 5], params, draft_length="3x2x2")
            while not request.finished:
                decoder.step()
        found.append(request.speculation.outcomes)
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "tokenwise"])
def test_a_second_draft_grows_trees_as_the_first_does(drafts: Pair, rule: str):
    """One beside the other in a round, each row has the tree of its own draft."""
    with Decoder.open(drafts.bundle) as decoder:
        each = [([5, 6, 7], RULES[rule], (drafter, "3/8")) for drafter in ("model", "model2")]
        alone = [decoder.generate([own[0]], own[1], draft_length="3/8", drafter=own[2][0])[0] for own in each]
        requests = [decoder.submit(own[0], own[1], draft_length="3/8", drafter=own[2][0]) for own in each]
        while decoder.step():
            pass
    assert [tuple(request.token_ids) for request in requests] == [one.token_ids for one in alone]


# What they are worth.


@pytest.mark.parametrize(
    ("bundle", "worse", "better"),
    [
        ("llama", [("model", "2+0")], ("model", "2+6")),
        ("llama", [("model", 3)], ("model", "3/9")),
        ("llama", [("model", "3/9")], ("model", "3/27")),
        ("llama", [("model", 2), ("random", 2)], ("model+random", 2)),
        ("drafts", [("model", 2), ("model2", 2)], ("model+model2", 2)),
    ],
    ids=str,
)
def test_what_is_beside_a_line_makes_rounds_longer(
    request: pytest.FixtureRequest, bundle: str, worse: list[Choice], better: Choice
):
    """Each is one more chance; of tokens that a random drafter proposes hardly any stand."""
    with Decoder.open(request.getfixturevalue(bundle).bundle) as decoder:
        for rule in set(RULES) - ({"greedy"} if "random" in str(worse) else set()):  # whose best is always the same
            params = [replace(RULES[rule], seed=seed, max_new_tokens=60, top_k=0, top_p=1.0) for seed in range(8)]
            rounds = [
                sum(
                    one.speculation.rounds
                    for one in decoder.generate(
                        [[3, 4, 5 + seed] for seed in range(8)], params, draft_length=length, drafter=drafter
                    )
                )
                for drafter, length in (*worse, better)
            ]
            assert rounds[-1] < min(rounds[:-1]), f"{rule}: {rounds}"


@pytest.mark.parametrize("length", ["4+0", "4/4", "1x1x1x1"])
def test_a_shape_without_branches_is_a_line(llama: Pair, length: str):
    with Decoder.open(llama.bundle) as decoder:
        line, other = (decoder.generate([[3, 4, 5]], SAMPLED, draft_length=one)[0] for one in (4, length))
    assert line.token_ids == other.token_ids
    assert line.speculation.outcomes == other.speculation.outcomes


@pytest.mark.parametrize("rule", RULES)
def test_a_line_with_nothing_to_copy_is_no_line(llama: Pair, rule: str):
    """Beside a drafter that finds nothing, the other is as alone: text, counts and what its draft reads."""
    with Decoder.open(llama.bundle) as decoder:
        alone, beside = (
            decoder.generate([[3, 4, 5]], replace(RULES[rule], max_new_tokens=3), draft_length=2, drafter=drafter)[0]
            for drafter in ("model", "suffix+model")
        )
    assert alone.token_ids == beside.token_ids
    assert alone.speculation.outcomes == beside.speculation.outcomes


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_k": 2}, {"min_p": 0.3}, {"top_p": 0.2}], ids=str)
def test_a_tree_has_as_many_branches_as_there_are_tokens_left(llama: Pair, filters: dict[str, float]):
    """Where filters leave fewer than it may have, round after round."""
    params = replace(SAMPLED, rule="coupled", max_new_tokens=150, **filters)
    with Decoder.open(llama.bundle) as decoder:
        [expected] = decoder.generate([[3, 4, 5]], params, draft_length=0)
        for shape in ("3/9", "4/20", "16/64", "4+12"):
            request = decoder.submit([3, 4, 5], params, draft_length=shape)
            while decoder.step():
                found = decoder.last_frame.nodes
                if isinstance(found, Tree):
                    assert int(found.depths.max()) <= read_shape(shape).length
                    assert bool((found.parents < found.numbers[1:]).all())
            assert tuple(request.token_ids) == expected.token_ids


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_round_keeps_what_the_best_of_its_lines_would_keep(drafts: Pair, rule: str):
    """That is all in which a path agrees with the text, which is the same whatever is proposed."""
    params, from_others = replace(RULES[rule], max_new_tokens=60, top_k=0), 0
    with Decoder.open(drafts.bundle) as decoder:
        outputs = decoder.generate(
            [[3, 4, 5, 6], REPEATS], params, draft_length=4, drafter="model+lookup+model2", trace=True
        )
    for output in outputs:
        begun = 0
        for each in output.trace:
            rest = output.token_ids[begun:]
            paths: list[tuple[int, ...]] = []
            for one in each.siblings:
                before = each.proposal[: one.place] if one.after is None else paths[one.after]
                paths.append((*before, one.token))
            agree = [len(path) for path in paths if rest[: len(path)] == path]
            own = each.proposal
            line = next((i for i, token in enumerate(own) if rest[i : i + 1] != (token,)), len(own))
            if len(rest) > 4:
                assert each.accepted == max([line, *agree])
                from_others += each.accepted > line
            begun += each.accepted + 1
    assert from_others


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rule", "worse", "better", "least"),
    [
        ("greedy", 8, "6+2", 1.1),
        ("coupled", 8, "5+3", 1.1),
        ("tokenwise", 8, "6+2", 1.0),
        ("greedy", "6+18", "6/24", 1.02),
        ("coupled", "6+18", "6/24", 1.05),
        ("tokenwise", "6+18", "6/24", 1.02),
        ("rejection", "6+18", "6/24", 1.0),
    ],
)
def test_a_shape_of_the_demo_pair_keeps_more_than_another_of_as_many_proposals(
    demo: Pair, rule: str, worse: int | str, better: str, least: float
):
    plain, kept = replace(RULES[rule], max_new_tokens=96, top_k=0, top_p=1.0), {}
    with Decoder.open(demo.bundle) as decoder:
        prompts = bench_prompts("python", decoder.vocab_size)
        for length in (worse, better):
            total = Speculation()
            for seed in range(1 if rule == "greedy" else 3):
                params = [replace(plain, seed=10 * seed + i) for i in range(len(prompts))]
                for output in decoder.generate(prompts, params, draft_length=length):
                    total.add(output.speculation)
            kept[length] = total.tokens_per_round
    assert kept[better] >= least * kept[worse], kept


@pytest.mark.exhaustive
def test_greedy_text_of_the_demo_pair_is_worth_a_line_of_copies(demo: Pair):
    """With as many proposals; the table in tools/docs/figures.md has the numbers."""
    params, kept = replace(RULES["greedy"], max_new_tokens=96), {}
    with Decoder.open(demo.bundle, max_batch=6) as decoder:
        prompts = bench_prompts("python", decoder.vocab_size)
        for drafter, length in (("model", 8), ("model+suffix", 4)):
            decoder.forget_outputs()
            total = Speculation()
            for output in decoder.generate(prompts, params, draft_length=length, drafter=drafter):
                total.add(output.speculation)
            kept[drafter] = total.tokens_per_round
    assert kept["model+suffix"] >= 1.15 * kept["model"], kept


# What is told of them.


def assert_same_logprobs(found: Output, plain: Output) -> None:
    assert found.speculation.accepted
    assert [one.token_id for one in found.logprobs] == list(plain.token_ids)
    for ours, theirs in zip(found.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probs_are_those_of_the_path_that_stands(llama: Pair, shape: str):
    params, (drafter, length) = replace(RULES["greedy"], logprobs=2), SHAPES[shape]
    with Decoder.open(llama.bundle) as decoder:
        [plain] = decoder.generate([[3, 4, 5]], params, draft_length=0)
        [found] = decoder.generate([[3, 4, 5]], params, draft_length=length, drafter=drafter)
    assert_same_logprobs(found, plain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("drafter", "length", "most"), [("random", "3+4", 4), ("model", "3x3x2", 27), ("random+model", 3, 3)]
)
def test_a_trace_tells_what_stood_and_what_did_not(llama: Pair, drafter: str, length: int | str, most: int, rule: str):
    if (rule, drafter) == ("greedy", "random"):
        drafter = "model"  # the best tokens of the other are always the same
    stood, followed, counts = 0, 0, set()
    with Decoder.open(llama.bundle) as decoder:
        params = [replace(RULES[rule], max_new_tokens=80, seed=seed) for seed in range(4)]
        prompts = [[3, 4, 5], [9, 8], [7], REPEATS]
        outputs = decoder.generate(prompts, params, draft_length=length, drafter=drafter, trace=True)
    for one in outputs:
        said = [token for each in one.trace for token in (*each.standing, each.next_token) if token is not None]
        assert said == list(one.token_ids)
        for each in one.trace:
            assert len(each.standing) == each.accepted
            assert len(each.p) == len(each.q) == len(each.proposal) <= 3
            counts.add(len(each.siblings))
            places = [(sibling.place, sibling.after) for sibling in each.siblings]
            assert places == sorted(places, key=lambda one: one[0])
            for i, sibling in enumerate(each.siblings):
                assert 0 <= sibling.p <= 1
                assert 0 < sibling.q <= 1
                stood += sibling.stands
                beside = list(each.proposal[sibling.place : sibling.place + 1])
                if sibling.after is not None:
                    assert each.siblings[sibling.after].place == sibling.place - 1
                    assert sibling.after < i
                    assert each.siblings[sibling.after].stands or not sibling.stands
                    followed += sibling.stands
                    beside = []
                same = [other.token for other in each.siblings if (other.place, other.after) == places[i]]
                assert len({*beside, *same}) == len(beside) + len(same), "no token stands beside itself"
    assert max(counts) == most
    assert stood
    assert bool(followed) == ("+" not in str(length))


# What requests and caches go through.


@pytest.mark.parametrize(
    "turns",
    [
        ((3, "model"), ("1+2", "random"), (2, "lookup"), ("4+4", "model"), (0, "none")),
        (
            (3, "model"),
            ("2x2", "model"),
            ("1+2", "random"),
            (2, "lookup"),
            ("4/6", "model"),
            (2, "model+lookup"),
            (0, "none"),
        ),
        ((3, "model+random"), ("1+2", "random"), (2, "lookup+model"), (4, "model"), (0, "none")),
    ],
    ids=["comb", "tree", "lines"],
)
def test_a_request_turns_to_other_shapes_and_back(llama: Pair, turns: Sequence[tuple[int | str, str]]):
    params = replace(RULES["greedy"], max_new_tokens=60)
    with Decoder.open(llama.bundle) as decoder:
        [expected] = decoder.generate([[3, 4, 5]], params, draft_length=0)
        request = decoder.submit([3, 4, 5], params, draft_length="2+3")
        for length, drafter in turns * 5:
            decoder.step()
            if not request.finished:
                request.draft(length, drafter)
        while not request.finished:
            decoder.step()
    assert tuple(request.token_ids) == expected.token_ids


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize(
    "asked",
    [
        [("model", "3/9")],
        [("model", "3+5")],
        [("model", "3/9"), ("model", "2x2x2"), ("model", "4/8"), ("model", "3+3")],
        [("random+model", 3), ("model+lookup", 3), ("cascade", 3)],
        [("random+model", 3), ("model", "4/8"), ("model", "3+3"), ("model", 5)],
    ],
    ids=["tree", "comb", "trees", "lines", "all"],
)
def test_both_caches_hold_the_path_that_stands(llama: Pair, asked: Sequence[Choice], rule: str):
    """After each round their entries are those of the committed tokens, as a fresh reading writes them.

    The draft's claim none of a sibling that it has not read, nor of another line.
    """
    prompts = [[3, 4, 5], REPEATS, [7, 7, 7], [11, 12, 13, 14]]
    with Decoder.open(llama.bundle) as decoder, Decoder.open(llama.bundle) as fresh:
        for i, (drafter, length) in enumerate(asked):
            params = replace(RULES[rule], max_new_tokens=40, seed=i, top_k=0)
            decoder.submit(prompts[i], params, draft_length=length, drafter=drafter)
        off_line = compared = 0
        while decoder.step():
            verdict = decoder.last_frame.verdict
            off_line += int((verdict.last != verdict.accepted).sum())
            for ours, other in ((decoder.target, fresh.target), (decoder.draft, fresh.draft)):
                for occupant in decoder.live:
                    if occupant.request.finished or not (entries := ours.cache.entries[occupant.row]):
                        continue
                    grows = "/" in str(occupant.request.draft_length) or "x" in str(occupant.request.draft_length)
                    if ours is decoder.target or (grows and not any("+" in one for one, _ in asked)):
                        assert entries >= occupant.request.length - 2
                    tokens = torch.tensor([*occupant.request.prompt, *occupant.request.token_ids])[:entries]
                    with torch.inference_mode():
                        other.cache.free(0)
                        other.prefill([0], [tokens])
                    for name in ours.engine.contract.cache_names:
                        found, expected = (
                            cache.read(row, name)[:, :entries]
                            for cache, row in ((ours.cache, occupant.row), (other.cache, 0))
                        )
                        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
                    compared += 1
        assert off_line > 2
        assert compared > 10


def prefills_of_the_draft(decoder: Decoder) -> list[object]:
    """The rows of each call in which the draft reads outside of rounds from now on."""
    read, prefill = [], decoder.draft.prefill
    decoder.draft.prefill = lambda rows, tokens: (read.append(rows), prefill(rows, tokens))[1]
    return read


def test_the_draft_reads_what_another_line_has_proposed_within_its_own_first_step(llama: Pair):
    """No step of its own is spent on it: as many steps of the draft as proposals, whichever line stands."""
    with Decoder.open(llama.bundle) as decoder:
        params = replace(RULES["coupled"], max_new_tokens=60, top_k=0)
        request = decoder.submit([3, 4, 5, 6, 7, 8], params, draft_length=3, drafter="random+model", trace=True)
        decoder.step()
        read = prefills_of_the_draft(decoder)
        while decoder.step():
            pass
        stood = {one.accepted for one in request.output().trace}
    assert stood >= {0, 1, 2}
    assert not read


@pytest.mark.parametrize("beside", ["model", "lookup"])
def test_beside_several_lines_a_single_one_costs_its_draft_no_step_of_its_own(llama: Pair, beside: str):
    with Decoder.open(llama.bundle) as decoder:
        params = replace(RULES["coupled"], max_new_tokens=60, top_k=0)
        drafter = "random+model" if beside == "model" else "lookup+random"
        decoder.submit([3, 4, 5, 6, 7, 8], params, draft_length=2, drafter=drafter)
        decoder.submit([9, 8, 7, 6, 5, 4], params, draft_length=4, drafter="model")
        decoder.step()
        read = prefills_of_the_draft(decoder)
        while len(decoder.live) == 2:
            decoder.step()
        assert decoder.speculation.rounds > 10
    assert not read


@pytest.mark.parametrize("k", [3, 8])
def test_rounds_launched_ahead_leave_no_hole_in_the_cache_of_a_single_line(tmp_path: Path, k: int):
    """The draft runs for both rows in both lines, and the second run overwrites what the first has written."""
    params = SamplingParams(max_new_tokens=120, ignore_eos=True, temperature=1.0, seed=1)
    recorder, compared = Recorder(), 0
    with (
        patch.object(capture, "Record", recorder),
        patch.object(capture, "new_pool", lambda: "pool"),
        patch.multiple(ScriptedEngine, static_capacity=True, capturable=lambda self: True),
        scripted_decoder(tmp_path, by_length, by_length, max_batch=2) as decoder,
    ):
        decoder.target.engine.height = decoder.draft.engine.height = 3.0
        for drafter, length in (("random+model", 3), ("model", k)):
            decoder.submit(list(b"abcabcabc"), params, draft_length=length, drafter=drafter)
        while decoder.step():
            for row, request in enumerate(occupant.request for occupant in decoder.live):
                entries = decoder.draft.cache.entries[row]
                if not request.finished and entries:
                    found = decoder.draft.cache.read(row, "key_0")[0, :entries, 0].long().tolist()
                    assert found == [*request.prompt, *request.token_ids][:entries], request.drafter
                    compared += 1
    assert recorder.most_unread == 2, "some were launched ahead"
    assert compared > 20


def by_length(context: Sequence[int]) -> int:
    return 97 + len(context) % 13


def test_a_round_is_as_wide_as_its_longest_line_whichever_that_is(tmp_path: Path):
    """The first line may be a short copy: at no length is the end of the cache written past, as this engine tells."""
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with scripted_decoder(tmp_path, hardly_repeated, hardly_repeated) as decoder:
        for length in range(90, 135, 3):
            said = [hardly_repeated(range(place)) for place in range(length + 6)]
            [output] = decoder.generate([said[:length]], params, draft_length=16, drafter="suffix+model")
            assert list(output.token_ids) == said[length:]


def hardly_repeated(context: Sequence[int]) -> int:
    count = len(context)
    return 97 + (31 * count**2 + 17 * (count // 3)) % 150 % 26


def test_a_prediction_may_have_a_line_beside_others(llama: Pair):
    params = replace(RULES["greedy"], max_new_tokens=30)
    with Decoder.open(llama.bundle) as decoder:
        [expected] = decoder.generate([[3, 4, 5]], params, draft_length=0)
        found = decoder.submit([3, 4, 5], params, drafter="suffix+model", draft_length=4, prediction=expected.token_ids)
        while decoder.step():
            pass
        assert found.output().token_ids == expected.token_ids
        assert found.output().speculation.rounds < 12
        with pytest.raises(RequestError, match="but a prediction is copied by suffix"):
            decoder.submit([3], params, drafter="lookup+model", prediction=[4])


def test_the_order_of_the_names_does_not_matter_to_the_text(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        texts = {
            decoder.generate([REPEATS], RULES["coupled"], draft_length=3, drafter="+".join(names))[0].token_ids
            for names in permutations(("model", "random", "lookup"))
        }
    assert len(texts) == 1


# What cannot be.


@pytest.mark.parametrize(
    ("drafter", "length", "message"),
    [
        ("model", "0+2", "draft_length is 0+2, expected 1 to 16 levels, at most 4 children of a node"),
        ("model", "2+7", "at most 4 children of a node, 48 proposals beside the line, and at most 64 together"),
        ("model", "17+1", "draft_length is 17+1, expected 1 to 16 levels"),
        ("model", "4+", "draft_length is '4+', expected auto, a whole number from 0 to 16, a comb"),
        ("lookup", "3+3", "drafter lookup can put nothing beside its proposals; use model or "),
        ("cascade", "3+3", "drafter cascade can put nothing beside its proposals"),
        ("model", "0/2", "draft_length is 0/2, expected 1 to 16 levels"),
        ("model", "3/2", "draft_length is 3/2, expected 1 to 16 levels"),
        ("model", "1/5", "draft_length is 1/5, expected 1 to 16 levels"),
        ("model", "5x1", "draft_length is 5x1, expected 1 to 16 levels, at most 4 children of a node"),
        ("model", "2x0", "draft_length is 2x0, expected 1 to 16 levels"),
        ("model", "4x4x4", "draft_length is 4x4x4, expected"),
        ("model", "99x99x99x99x99x99x99x99", "draft_length is 99x99x99x99x99x99x99x99, expected"),
        ("model", "8/57", "48 proposals beside the line"),
        ("model", "17/20", "expected 1 to 16 levels"),
        ("model", "4/", "draft_length is '4/', expected auto, a whole number from 0 to 16, a comb"),
        ("lookup", "3/9", "drafter lookup can grow no tree here; use model, or give a number"),
        ("random", "3/9", "drafter random can grow no tree here"),
        ("model+lookup", "3/9", "draft_length is 3/9, expected a whole number from 0 to 16 for each drafter"),
        ("model+random", "3+3", "draft_length is 3+3, expected a whole number"),
        ("model+random", 17, "draft_length is 17, expected a whole number from 0 to 16 for each drafter"),
        ("model+random", -1, "draft_length is -1, expected a whole number from 0 to 16 for each drafter"),
        ("model+random", "auto", "draft_length is 'auto', expected a whole number from 0 to 16"),
        ("model+random", EntropyRule(), "draft_length is EntropyRule"),
        (
            "model+model",
            4,
            "drafter model+model names model twice, which has one line to propose; name it once, or lookup",
        ),
        ("model+cascade", 4, "drafter model+cascade has a line of cascade, which goes with no other"),
        ("model+none", 4, "drafter is 'model+none', expected one of"),
        ("model+", 4, "drafter is 'model+', expected one of"),
        ("mixed+model", "auto", "drafter is 'mixed+model', expected one of"),
        ("suffix+suffix2", 4, "drafter is 'suffix+suffix2', expected one of"),
    ],
)
def test_what_cannot_be_is_refused(llama: Pair, drafter: str, length: object, message: str):
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match=re.escape(message)):
        decoder.submit([1, 2], SAMPLED, draft_length=length, drafter=drafter)


@pytest.mark.parametrize(("drafter", "length"), [("model", "2+1"), ("model", "2/3")])
def test_an_engine_that_takes_lines_only_says_so(llama: Pair, drafter: str, length: str):
    with Decoder.open(llama.bundle, engine="openvino") as decoder:
        assert set(decoder.drafters) <= set(DRAFTERS)
        with pytest.raises(RequestError, match="this engine verifies lines of proposals only, not 2"):
            decoder.submit([1, 2], SAMPLED, draft_length=length, drafter=drafter)


def test_a_draft_whose_engine_takes_lines_only_grows_no_tree(llama: Pair):
    with (
        Decoder.open(llama.bundle, draft_engine="openvino") as decoder,
        pytest.raises(RequestError, match=r"drafter model can grow no tree here; give a number, or a comb like 5\+3"),
    ):
        decoder.submit([1, 2], SAMPLED, draft_length="2/3")


def test_more_lines_than_a_round_may_have_are_refused(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    names = [name for name in DRAFTERS if name != "cascade"]
    drafter = "+".join(names[: MOST_LINES + 1])
    with Decoder.open(llama.bundle) as decoder:
        monkeypatch.setattr(decoder._rules, "unavailable", {})
        with pytest.raises(RequestError, match=rf"names {MOST_LINES + 1} drafters, expected at most {MOST_LINES}"):
            decoder.submit([3, 4, 5], draft_length=1, drafter=drafter)


@pytest.mark.parametrize(
    ("asked", "beside", "refused", "message"),
    [
        (
            ("model", "3+5"),
            ("model", 6),
            ("model", "3+5"),
            r"3\+5 needs steps of 14 tokens .* at most 9; use rule coupled",
        ),
        (
            ("model", "3/8"),
            ("model", 6),
            ("model", "3/8"),
            r"3/8 needs steps of 14 tokens .* at most 9; use rule coupled",
        ),
        (
            ("model+random", 4),
            ("model", 6),
            ("model+random", 4),
            "needs steps of 17 tokens .* at most 9; use rule coupled",
        ),
    ],
    ids=["comb", "tree", "lines"],
)
def test_a_narrow_engine_leaves_out_what_it_has_no_room_for_where_no_text_depends_on_it(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, asked: Choice, beside: Choice, refused: Choice, message: str
):
    """As plans that were compiled for so many tokens: a longer line beside it takes the room."""
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 9)
    prompts = [[3, 4, 5], [9, 8, 7]]
    with Decoder.open(llama.bundle) as decoder:
        alone = [one.token_ids for one in decoder.generate(prompts, RULES["coupled"], draft_length=0)]
        requests = [
            decoder.submit(prompt, RULES["coupled"], draft_length=length, drafter=drafter)
            for prompt, (drafter, length) in zip(prompts, (asked, beside), strict=True)
        ]
        widths = set()
        while decoder.step():
            widths.add(decoder.last_frame.verify.input_ids.shape[1])
        assert max(widths) == 9
        assert [tuple(one.token_ids) for one in requests] == alone
        for params in (SAMPLED, LENIENT["lenient greedy"]):
            with pytest.raises(RequestError, match=message):
                decoder.submit([3, 4, 5], params, drafter=refused[0], draft_length=refused[1])
        with pytest.raises(RequestError, match=r"and at most 8 together|from 0 to 4 for each drafter"):
            decoder.submit([3, 4, 5], RULES["coupled"], drafter=asked[0], draft_length=5 if "+" in asked[0] else "4+5")


def test_without_a_length_lines_are_as_long_as_a_narrow_engine_takes(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 5)
    with Decoder.open(llama.bundle) as decoder:
        assert decoder.submit([3, 4, 5], RULES["coupled"], drafter="model+random").draft_length == 2


def test_a_draft_with_narrow_steps_reads_what_it_lacks_before_the_round(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    """As on plans of TensorRT without trees of drafts: none of its steps is wider than two."""
    with Decoder.open(llama.bundle) as decoder:
        monkeypatch.setattr(decoder.draft.engine, "read_width", 2)
        params = replace(RULES["coupled"], max_new_tokens=40)
        expected = decoder.generate([[3, 4, 5], REPEATS], params, draft_length=0)
        found = decoder.generate([[3, 4, 5], REPEATS], params, draft_length=4, drafter="random+model")
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert decoder.last_frame.window is None
        assert decoder.speculation.accepted


# The bytes of the caches.


def bytes_for(tokens: int, decoder: Decoder) -> int:
    return tokens * sum(model.engine.contract.cache_bytes_per_token for model in (decoder.target, decoder.draft))


def steps_within(tokens: int, decoder: Decoder, turn: Callable[[], None] = lambda: None) -> None:
    """Step to the end, and look at the target's cache after each round; `turn` is called after the tenth."""
    cache, rounds = decoder.target.cache, 0
    while decoder.step():
        assert cache.rows * cache.capacity <= tokens
        rounds += 1
        if rounds == 10:
            turn()


@pytest.mark.parametrize(
    ("tokens", "asked"),
    [
        (600, [(100, 108, "random", 0), (10, 130, "random", "16+48")]),
        (128, [(10, 28, "random", 16), (10, 28, "random", "4+12")]),
        (600, [(100, 108, "model", 0), (10, 130, "model", "16/64")]),
        (300, [(10, 60, drafter, 16) for drafter in ("random", "random+model+lookup", "model")]),
    ],
    ids=["wide comb", "comb beside a line", "tree", "lines"],
)
def test_rounds_stay_within_the_bytes_of_the_caches(
    llama: Pair, tokens: int, asked: list[tuple[int, int, str, int | str]]
):
    """A round is as wide as the longest line and the most that is beside one together, whosever they are."""
    with Decoder.open(llama.bundle) as decoder:
        budget = bytes_for(tokens, decoder)
    with Decoder.open(llama.bundle, cache_bytes=budget) as decoder:
        requests = [
            decoder.submit(
                [3] * prompt, replace(RULES["greedy"], max_new_tokens=count), draft_length=length, drafter=drafter
            )
            for prompt, count, drafter, length in asked
        ]
        steps_within(tokens, decoder)
        assert all(request.output().finish_reason == "length" for request in requests)


def test_a_request_that_turns_to_a_wide_comb_stays_within_the_bytes_of_the_caches(llama: Pair):
    """It was admitted as a line: where both no longer fit, the younger waits, and goes on with the same text."""
    greedy = replace(RULES["greedy"], max_new_tokens=120)
    with Decoder.open(llama.bundle) as decoder:
        budget = bytes_for(600, decoder)
        alone = [output.token_ids for output in decoder.generate([[3] * 100, [5] * 10], greedy, draft_length=0)]
    with Decoder.open(llama.bundle, cache_bytes=budget) as decoder:
        older, younger = (decoder.submit(prompt, greedy, draft_length=4) for prompt in ([3] * 100, [5] * 10))
        steps_within(600, decoder, turn=lambda: older.draft("16+48", "random"))
        assert [request.output().token_ids for request in (older, younger)] == alone


def test_a_request_that_turns_to_a_comb_too_wide_for_all_bytes_ends_with_an_error(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        budget = bytes_for(192, decoder)
    with Decoder.open(llama.bundle, cache_bytes=budget) as decoder:
        request = decoder.submit([3] * 10, replace(RULES["greedy"], max_new_tokens=143), draft_length=4)
        steps_within(192, decoder, turn=lambda: request.draft("16+48", "random"))
        with pytest.raises(EngineError, match=r"room for 192 tokens, not for 1 rows of \d+; raise cache_bytes"):
            request.output()


def test_a_request_that_waits_and_becomes_too_wide_ends_with_an_error(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        budget = bytes_for(64, decoder)
    with Decoder.open(llama.bundle, cache_bytes=budget) as decoder:
        wide = decoder.submit([3, 4], replace(RULES["greedy"], max_new_tokens=20), draft_length=4)
        next_one = decoder.submit([3, 4], replace(RULES["greedy"], max_new_tokens=20), draft_length=4)
        wide.draft(16, "model+lookup+random")
        steps_within(64, decoder)
        with pytest.raises(EngineError, match="too wide for cache_bytes; ask for fewer proposals"):
            wide.output()
        assert len(next_one.output().token_ids) == 20
