"""Trees that a draft grows: texts and log-probs are those without, whatever is beside; what cannot be is refused."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import Decoder, RequestError, SamplingParams, Speculation, TreeLength
from trt_spec.tools.measuring.shipped_prompts import bench_prompts

from ..bundles import Pair
from .test_combs import LENIENT, RULES, SAMPLED, assert_same_logprobs, bytes_for, steps_within
from .test_greedy import random_prompts

TREES = ("1/2", "4/12", "3x2x1", "2x2x2x2", "1x1x3", "16/64", "4x4", TreeLength(5, 5))


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_text_is_that_of_plain_decoding(pairs, family: str, rule: str):
    prompts = random_prompts(64, [2, 5, 9, 23], seed=8)
    with Decoder.open(pairs(family).bundle) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, RULES[rule], draft_length=0)]
        for tree in TREES:
            found = decoder.generate(prompts, RULES[rule], draft_length=tree)
            assert [one.token_ids for one in found] == expected, f"{tree}"
        [alone] = decoder.generate(prompts[-1], RULES[rule], draft_length="4/10")
        assert alone.token_ids == expected[-1]
        assert decoder.speculation.accepted


@pytest.mark.parametrize("rule", RULES | LENIENT)
def test_no_request_depends_on_what_its_neighbours_propose(llama: Pair, rule: str):
    """Be they lines, combs, several lines, or other trees, deeper or not."""
    own, other, asked = [5, 6, 7, 5, 6, 7], [9, 8, 7, 9, 8, 7], (RULES | LENIENT)[rule]
    for length in (3, "3+2", "5+5", "3/7", "2x2x1"):
        with Decoder.open(llama.bundle) as decoder:
            [alone] = decoder.generate([own], asked, draft_length=length)
        for beside, drafter in (
            (7, "model"),
            ("5+4", "model"),
            (3, "model+lookup"),
            ("5/20", "model"),
            ("1/3", "model"),
        ):
            for neighbour in (RULES["greedy"], RULES["rejection"]):
                with Decoder.open(llama.bundle) as decoder:
                    params = replace(neighbour, max_new_tokens=60)
                    decoder.submit(other, params, draft_length=beside, drafter=drafter)
                    request = decoder.submit(own, asked, draft_length=length)
                    while not request.finished:
                        decoder.step()
                assert tuple(request.token_ids) == alone.token_ids, f"{length} beside {beside}, {neighbour.rule}"


@pytest.mark.parametrize("rule", RULES)
def test_a_tree_and_a_cascade_beside_it_propose_what_they_propose_alone(llama: Pair, rule: str):
    params = replace(RULES[rule], max_new_tokens=40)
    settings = [([5, 6, 7, 5, 6, 7], "4/12", "model"), ([9, 8, 7, 9, 8, 7], 6, "cascade")]

    def run(settings: Sequence[tuple[Sequence[int], str | int, str]]) -> list[tuple[list[int], int, int]]:
        with Decoder.open(llama.bundle) as decoder:
            requests = [decoder.submit(own, params, draft_length=k, drafter=name) for own, k, name in settings]
            while decoder.step():
                pass
        return [(one.token_ids, one.speculation.proposed, one.speculation.accepted) for one in requests]

    alone = [run([one])[0] for one in settings]
    assert run(settings) == alone
    assert all(accepted for _, _, accepted in alone)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "tokenwise"])
def test_a_second_draft_grows_trees_as_the_first_does(drafts: Pair, rule: str):
    """One beside the other in a round, each row has the tree of its own draft."""
    with Decoder.open(drafts.bundle) as decoder:
        alone = [
            decoder.generate([[5, 6, 7]], RULES[rule], draft_length="3/8", drafter=drafter)[0].token_ids
            for drafter in ("model", "model2")
        ]
        requests = [
            decoder.submit([5, 6, 7], RULES[rule], draft_length="3/8", drafter=drafter)
            for drafter in ("model", "model2")
        ]
        while not all(request.finished for request in requests):
            decoder.step()
    assert [tuple(request.token_ids) for request in requests] == alone


def test_branches_make_rounds_longer(llama: Pair):
    rounds = {}
    with Decoder.open(llama.bundle) as decoder:
        for rule in ("tokenwise", "rejection", "coupled", "greedy"):
            for length in (3, "3/9", "3/27"):
                params = [replace(RULES[rule], seed=seed, max_new_tokens=40) for seed in range(8)]
                outputs = decoder.generate([[3, 4, 5]] * 8, params, draft_length=length)
                rounds[length] = sum(one.speculation.rounds for one in outputs)
            assert rounds["3/27"] < rounds["3/9"] < rounds[3], rule


def test_a_tree_without_branches_is_a_line(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        line, *trees = (decoder.generate([[3, 4, 5]], SAMPLED, draft_length=one)[0] for one in (4, "4/4", "1x1x1x1"))
    for tree in trees:
        assert line.token_ids == tree.token_ids
        assert line.speculation.outcomes == tree.speculation.outcomes


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_k": 2}, {"min_p": 0.3}, {"top_p": 0.2}], ids=str)
def test_a_tree_has_as_many_branches_as_there_are_tokens_left(llama: Pair, filters: dict[str, float]):
    """Where filters leave fewer than it may have, round after round."""
    params = replace(SAMPLED, rule="coupled", max_new_tokens=150, **filters)
    with Decoder.open(llama.bundle) as decoder:
        [expected] = decoder.generate([[3, 4, 5]], params, draft_length=0)
        for tree in ("3/9", "4/20", "16/64"):
            request = decoder.submit([3, 4, 5], params, draft_length=tree)
            while decoder.step():
                found = decoder.last_frame.tree
                if found is not None:
                    assert int(found.depths.max()) <= TreeLength.read(tree).length
                    assert bool((found.parents < found.nodes[1:]).all())
            assert tuple(request.token_ids) == expected.token_ids


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


def test_log_probs_are_those_of_the_path_that_stands(llama: Pair):
    params = replace(RULES["greedy"], logprobs=2)
    with Decoder.open(llama.bundle) as decoder:
        plain, tree = (decoder.generate([[3, 4, 5]], params, draft_length=one)[0] for one in (0, "3x2x2"))
    assert_same_logprobs(tree, plain)


@pytest.mark.parametrize("rule", RULES)
def test_a_trace_tells_what_stood_and_what_did_not(llama: Pair, rule: str):
    behind_a_sibling = 0
    with Decoder.open(llama.bundle) as decoder:
        params = [replace(RULES[rule], max_new_tokens=80, seed=seed) for seed in range(4)]
        prompts = [[3, 4, 5], [9, 8], [7], [11, 12]]
        outputs = decoder.generate(prompts, params, draft_length="3x3x2", trace=True)
        for one in outputs:
            said = [token for each in one.trace for token in (*each.standing, each.next_token) if token is not None]
            assert said == list(one.token_ids)
            for each in one.trace:
                assert len(each.standing) == each.accepted
                assert len(each.siblings) <= 2 + 8 + 17
                followed = [(sibling.place, sibling.after) for sibling in each.siblings]
                assert followed == sorted(followed, key=lambda one: one[0])
                for i, sibling in enumerate(each.siblings):
                    assert 0 <= sibling.p <= 1
                    assert 0 < sibling.q <= 1
                    if sibling.after is None:
                        beside = [each.proposal[sibling.place]]
                    else:
                        assert each.siblings[sibling.after].place == sibling.place - 1
                        assert sibling.after < i
                        assert each.siblings[sibling.after].stands or not sibling.stands
                        behind_a_sibling += sibling.stands
                        beside = []
                    same = [other.token for other in each.siblings if (other.place, other.after) == followed[i]]
                    assert len({*beside, *same}) == len(beside) + len(same), "no token stands beside itself"
    assert behind_a_sibling
    assert max(len(each.siblings) for one in outputs for each in one.trace) == 2 + 8 + 17


def test_a_request_turns_from_a_tree_to_a_line_and_back(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        [expected] = decoder.generate([[3, 4, 5]], RULES["greedy"], draft_length=0)
        request = decoder.submit([3, 4, 5], RULES["greedy"], draft_length="3/9")
        turns = (
            (3, "model"),
            ("2x2", "model"),
            ("1+2", "random"),
            (2, "lookup"),
            ("4/6", "model"),
            (2, "model+lookup"),
        )
        for length, drafter in (*turns, (0, "none")) * 5:
            decoder.step()
            if not request.finished:
                request.draft(length, drafter)
        while not request.finished:
            decoder.step()
    assert tuple(request.token_ids) == expected.token_ids


@pytest.mark.parametrize("prompts", [[[3, 4, 5]], [[3, 4, 5], [9, 8], [7], [11, 12, 13, 14]]], ids=["alone", "four"])
def test_both_caches_hold_the_path_that_stands(llama: Pair, prompts: Sequence[Sequence[int]]):
    """After each round their entries are those of the committed tokens, as a fresh reading writes them."""
    lengths = ("3/9", "2x2x2", "4/8", "3+3")
    with Decoder.open(llama.bundle) as decoder, Decoder.open(llama.bundle) as fresh:
        for i, prompt in enumerate(prompts):
            params = replace(RULES["coupled"], max_new_tokens=40, seed=i)
            decoder.submit(prompt, params, draft_length=lengths[i])
        off_line = 0
        while decoder.step():
            verdict = decoder.last_frame.verdict
            off_line += int((verdict.last != verdict.accepted).sum())
            for ours, other in ((decoder.target, fresh.target), (decoder.draft, fresh.draft)):
                for occupant in decoder._scheduler.live:
                    entries = ours.cache.entries[occupant.row]
                    assert entries >= occupant.request.length - 2 - (lengths[occupant.row] == "3+3")
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
        assert off_line > 5


@pytest.mark.parametrize(
    ("tree", "drafter", "params", "message"),
    [
        ("0/2", "model", SAMPLED, r"draft_length is 0/2, expected a tree of 1 to 16 levels, at most 4 children"),
        ("3/2", "model", SAMPLED, r"draft_length is 3/2, expected a tree of 1 to 16 levels"),
        ("5x1", "model", SAMPLED, "at most 4 children of a node, 48 proposals beside its line, and 64 together"),
        ("4x4x4", "model", SAMPLED, r"draft_length is 4x4x4, expected"),
        ("8/57", "model", SAMPLED, "48 proposals beside its line"),
        ("17/20", "model", SAMPLED, "expected a tree of 1 to 16 levels"),
        ("4/", "model", SAMPLED, "draft_length is '4/', expected auto, a whole number from 0 to 16, a comb"),
        ("3/9", "lookup", SAMPLED, "drafter lookup can grow no tree here; use model, or give a number"),
        ("3/9", "random", SAMPLED, "drafter random can grow no tree here"),
        ("3/9", "model+lookup", SAMPLED, r"draft_length is 3/9, expected a whole number from 0 to 16 for each source"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(llama: Pair, tree: str, drafter: str, params: SamplingParams, message: str):
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match=message):
        decoder.submit([1, 2], params, draft_length=tree, drafter=drafter)


def test_an_engine_that_takes_lines_only_says_so(llama: Pair):
    with (
        Decoder.open(llama.bundle, engine="openvino") as decoder,
        pytest.raises(RequestError, match="this engine verifies lines of proposals only, not 2/3"),
    ):
        decoder.submit([1, 2], SAMPLED, draft_length="2/3")


def test_a_draft_whose_engine_takes_lines_only_grows_no_tree(llama: Pair):
    with (
        Decoder.open(llama.bundle, draft_engine="openvino") as decoder,
        pytest.raises(RequestError, match=r"drafter model can grow no tree here; give a number, or a comb like 5\+3"),
    ):
        decoder.submit([1, 2], SAMPLED, draft_length="2/3")


def test_a_narrow_engine_leaves_out_trees_where_no_text_depends_on_them(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 9)
    with Decoder.open(llama.bundle) as decoder:
        alone, other = (decoder.generate([one], RULES["coupled"], draft_length=0)[0] for one in ([3, 4, 5], [9, 8]))
        tree = decoder.submit([3, 4, 5], RULES["coupled"], draft_length="3/8")
        line = decoder.submit([9, 8], RULES["coupled"], draft_length=6)
        widths = set()
        while decoder.step():
            widths.add(decoder.last_frame.verify.input_ids.shape[1])
        assert max(widths) <= 9
        assert [tuple(one.token_ids) for one in (tree, line)] == [alone.token_ids, other.token_ids]
        with pytest.raises(RequestError, match=r"3/8 needs steps of 14 tokens .* at most 9; use rule coupled"):
            decoder.submit([3, 4, 5], SAMPLED, draft_length="3/8")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rule", "least"), [("greedy", 1.02), ("coupled", 1.05), ("tokenwise", 1.02), ("rejection", 1.0)]
)
def test_a_tree_of_the_demo_pair_keeps_more_than_a_comb_of_as_many_proposals(demo: Pair, rule: str, least: float):
    plain, kept = replace(RULES[rule], max_new_tokens=96, top_k=0, top_p=1.0), {}
    with Decoder.open(demo.bundle) as decoder:
        prompts = bench_prompts("python", decoder.vocab_size)
        for length in ("6+18", "6/24"):
            total = Speculation()
            for seed in range(1 if rule == "greedy" else 2):
                params = [replace(plain, seed=10 * seed + i) for i in range(len(prompts))]
                for output in decoder.generate(prompts, params, draft_length=length):
                    total.add(output.speculation)
            kept[length] = total.tokens_per_round
    assert kept["6/24"] >= least * kept["6+18"], kept


def test_a_tree_of_other_than_whole_numbers_is_refused():
    for length, nodes in ((5.0, 8), ("5", 8), (5, True)):
        with pytest.raises(RequestError, match=r"of a tree is .*, expected a whole number"):
            TreeLength(length, nodes)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((3, 10, (4, 4, 4)), "length and nodes of a tree with children (4, 4, 4) are 3 and 10, expected 3 and 84"),
        ((1, 3, (2, 2)), "length and nodes of a tree with children (2, 2) are 1 and 3, expected 2 and 6"),
        ((2, 3, ("a",)), "children of a tree are ('a',), expected whole numbers from 1 on"),
        ((1, 0, (0,)), "children of a tree are (0,), expected whole numbers from 1 on"),
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(fields: tuple[object, ...], said: str):
    with pytest.raises(RequestError, match=re.escape(said)):
        TreeLength(*fields)


def test_a_tree_beside_a_line_stays_within_the_bytes_of_the_caches(llama: Pair):
    """A round is as wide as the longest line and the most branches together, whosever they are."""
    with Decoder.open(llama.bundle) as decoder:
        budget = bytes_for(600, decoder)
    with Decoder.open(llama.bundle, cache_bytes=budget) as decoder:
        requests = [
            decoder.submit([3] * prompt, replace(RULES["greedy"], max_new_tokens=count), draft_length=length)
            for prompt, count, length in ((100, 108, 0), (10, 130, "16/64"))
        ]
        steps_within(600, decoder)
        assert all(request.output().finish_reason == "length" for request in requests)
