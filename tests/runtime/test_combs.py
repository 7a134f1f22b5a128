"""Combs of proposals: the same texts and log-probs as without, whatever is beside them; what cannot be is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from trt_spec.engines import EngineError
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import CombLength, Decoder, Output, RequestError, SamplingParams, Speculation
from trt_spec.runtime.drafters import DRAFTERS
from trt_spec.tools.measuring.shipped_prompts import bench_prompts

from ..bundles import Pair
from .test_greedy import random_prompts

SAMPLED = SamplingParams(temperature=1.0, seed=5, max_new_tokens=24, ignore_eos=True)
COMBS = ("1+1", "1+3", "3+3", "4+12", "16+48", CombLength(5, 0))
RULES = {
    "greedy": SamplingParams(max_new_tokens=24, ignore_eos=True),
    "rejection": SAMPLED,
    "tokenwise": replace(SAMPLED, rule="tokenwise", top_p=0.9),
    "coupled": replace(SAMPLED, rule="coupled", top_k=20),
}
LENIENT = {"lenient greedy": SamplingParams(max_new_tokens=48, ignore_eos=True, lenience=0.2)}


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("drafter", ["model", "random"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_text_is_that_of_plain_decoding(pairs, family: str, drafter: str, rule: str):
    prompts = random_prompts(64, [2, 5, 9, 23], seed=8)
    with Decoder.open(pairs(family).bundle) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, RULES[rule], draft_length=0)]
        for comb in COMBS:
            found = decoder.generate(prompts, RULES[rule], draft_length=comb, drafter=drafter)
            assert [one.token_ids for one in found] == expected, f"{comb}"
        [alone] = decoder.generate(prompts[-1], RULES[rule], draft_length="4+6", drafter=drafter)
        assert alone.token_ids == expected[-1]
        assert decoder.speculation.accepted


@pytest.mark.parametrize("rule", RULES | LENIENT)
def test_no_request_depends_on_whether_its_neighbours_have_siblings(llama: Pair, rule: str):
    """Nor does one with siblings depend on other combs, on lines, or on rows that propose nothing."""
    own, other, params = [5, 6, 7, 5, 6, 7], [9, 8, 7, 9, 8, 7], (RULES | LENIENT)[rule]
    for length in (3, "3+1", "3+2"):
        with Decoder.open(llama.bundle) as decoder:
            [alone] = decoder.generate([own], params, draft_length=length)
        for beside in (0, 7, "5+4", "2+6"):
            for neighbour in RULES.values():
                with Decoder.open(llama.bundle) as decoder:
                    decoder.submit(other, replace(neighbour, max_new_tokens=60), draft_length=beside)
                    request = decoder.submit(own, params, draft_length=length)
                    while not request.finished:
                        decoder.step()
                assert tuple(request.token_ids) == alone.token_ids, f"{length} beside {beside}, {neighbour.rule}"


def test_where_a_lenient_greedy_text_has_siblings_depends_on_no_neighbour(drafts: Pair):
    """Its text depends on them, so they hang where they hang when it is alone."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, lenience=0.1)
    with Decoder.open(drafts.bundle) as decoder:
        for prompt in random_prompts(64, [6] * 10, seed=1):
            [alone] = decoder.generate([prompt], params, draft_length="3+1", drafter="model2")
            neighbour = replace(params, max_new_tokens=90)
            other = decoder.submit([9, 8, 7, 9, 8, 7], neighbour, draft_length="2+6", drafter="model2")
            request = decoder.submit(prompt, params, draft_length="3+1", drafter="model2")
            while not request.finished:
                decoder.step()
            decoder.cancel(other)
            assert tuple(request.token_ids) == alone.token_ids


@pytest.mark.parametrize("lenience", [1.0, 0.3])
def test_a_line_beside_a_comb_keeps_what_it_keeps_alone(llama: Pair, lenience: float):
    """Whatever its source is, and though a lenient line keeps what the target would not have picked."""
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


def test_siblings_make_rounds_longer(llama: Pair):
    """Of tokens that a random source proposes hardly any stand; each sibling is one more chance."""
    rounds = {}
    with Decoder.open(llama.bundle) as decoder:
        for rule in ("tokenwise", "coupled", "greedy"):
            for length in ("2+0", "2+6"):
                params = [replace(RULES[rule], seed=seed, max_new_tokens=40) for seed in range(8)]
                outputs = decoder.generate([[3, 4, 5]] * 8, params, draft_length=length)
                rounds[rule, length] = sum(one.speculation.rounds for one in outputs)
            assert rounds[rule, "2+6"] < rounds[rule, "2+0"]


def test_a_comb_without_siblings_is_a_line(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        line, comb = (decoder.generate([[3, 4, 5]], SAMPLED, draft_length=one)[0] for one in (4, "4+0"))
    assert line.token_ids == comb.token_ids
    assert line.speculation.outcomes == comb.speculation.outcomes


def assert_same_logprobs(found: Output, plain: Output) -> None:
    assert found.speculation.accepted
    assert [one.token_id for one in found.logprobs] == list(plain.token_ids)
    for ours, theirs in zip(found.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_log_probs_are_those_of_the_path_that_stands(llama: Pair):
    params = replace(RULES["greedy"], logprobs=2)
    with Decoder.open(llama.bundle) as decoder:
        plain, comb = (decoder.generate([[3, 4, 5]], params, draft_length=one)[0] for one in (0, "3+5"))
    assert_same_logprobs(comb, plain)


@pytest.mark.parametrize("rule", RULES)
def test_a_trace_tells_what_stood_and_what_did_not(llama: Pair, rule: str):
    with Decoder.open(llama.bundle) as decoder:
        drafter = "model" if rule == "greedy" else "random"  # whose best tokens are always the same
        params = replace(RULES[rule], max_new_tokens=80)
        outputs = decoder.generate([[3, 4, 5], [9, 8]], params, draft_length="3+4", drafter=drafter, trace=True)
        for one in outputs:
            said = [token for each in one.trace for token in (*each.standing, each.next_token) if token is not None]
            assert said == list(one.token_ids)
            for each in one.trace:
                assert len(each.standing) == each.accepted
                assert len(each.siblings) <= 4
                assert sum(sibling.stands for sibling in each.siblings) <= 1
                for place in range(len(each.proposal)):
                    beside = [sibling.token for sibling in each.siblings if sibling.place == place]
                    assert len({each.proposal[place], *beside}) == 1 + len(beside), "no token stands beside itself"
                for sibling in each.siblings:
                    assert 0 <= sibling.p <= 1
                    assert 0 < sibling.q <= 1
    assert any(sibling.stands for one in outputs for each in one.trace for sibling in each.siblings)


def test_a_request_turns_from_a_comb_to_a_line_and_back(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        [expected] = decoder.generate([[3, 4, 5]], RULES["greedy"], draft_length=0)
        request = decoder.submit([3, 4, 5], RULES["greedy"], draft_length="2+3")
        for length, drafter in ((3, "model"), ("1+2", "random"), (2, "lookup"), ("4+4", "model"), (0, "none")) * 5:
            decoder.step()
            if not request.finished:
                request.draft(length, drafter)
        while not request.finished:
            decoder.step()
    assert tuple(request.token_ids) == expected.token_ids


def test_the_drafts_cache_claims_no_entry_of_a_sibling(llama: Pair):
    """After each round the draft's entries are those of the committed tokens, as a fresh reading writes them."""
    with Decoder.open(llama.bundle) as decoder:
        request = decoder.submit([3, 4, 5], replace(RULES["coupled"], max_new_tokens=40), draft_length="3+5")
        seen = 0
        while decoder.step():
            entries = decoder.draft.cache.entries[0]
            tokens = torch.tensor([*request.prompt, *request.token_ids])[:entries]
            name = decoder.draft.engine.contract.cache_names[-1]
            found = decoder.draft.cache.read(0, name)[:, :entries].clone()
            with Decoder.open(llama.bundle) as fresh, torch.inference_mode():
                fresh.draft.prefill([0], [tokens])
                expected = fresh.draft.cache.read(0, name)[:, :entries]
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            seen += entries < request.length - 1
    assert seen


@pytest.mark.parametrize(
    ("comb", "drafter", "params", "message"),
    [
        ("0+2", "model", SAMPLED, r"draft_length is 0\+2, expected a line of 1 to 16 proposals, at most 3 siblings"),
        ("2+7", "model", SAMPLED, "at most 3 siblings for each of them, and at most 64 together"),
        ("17+1", "model", SAMPLED, "expected a line of 1 to 16 proposals"),
        ("4+", "model", SAMPLED, "draft_length is '4[+]', expected auto, a whole number from 0 to 16, a comb"),
        ("3+3", "lookup", SAMPLED, "drafter lookup can hang no siblings beside its proposals; use model or "),
        ("3+3", "cascade", SAMPLED, "drafter cascade can hang no siblings"),
    ],
)
def test_a_comb_that_cannot_be_is_refused(llama: Pair, comb: str, drafter: str, params: SamplingParams, message: str):
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match=message):
        decoder.submit([1, 2], params, draft_length=comb, drafter=drafter)


def test_an_engine_that_takes_lines_only_says_so(llama: Pair):
    with Decoder.open(llama.bundle, engine="openvino") as decoder:
        assert set(decoder.drafters) <= set(DRAFTERS)
        with pytest.raises(RequestError, match="this engine verifies lines of proposals only, not 2"):
            decoder.submit([1, 2], SAMPLED, draft_length="2+1")


def test_a_narrow_engine_leaves_out_siblings_where_no_text_depends_on_them(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
):
    """As plans that were compiled for so many tokens: a line beside a comb takes the room of its siblings."""
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 9)
    with Decoder.open(llama.bundle) as decoder:
        alone, other = (decoder.generate([one], RULES["coupled"], draft_length=0)[0] for one in ([3, 4, 5], [9, 8]))
        comb = decoder.submit([3, 4, 5], RULES["coupled"], draft_length="3+5")
        line = decoder.submit([9, 8], RULES["coupled"], draft_length=6)
        widths = set()
        while decoder.step():
            widths.add(decoder.last_frame.verify.input_ids.shape[1])
        assert max(widths) == 9
        assert [tuple(one.token_ids) for one in (comb, line)] == [alone.token_ids, other.token_ids]
        with pytest.raises(RequestError, match=r"3\+5 needs steps of 14 tokens .* at most 9; use rule coupled"):
            decoder.submit([3, 4, 5], SAMPLED, draft_length="3+5")
        with pytest.raises(RequestError, match=r"3\+5 needs steps of 14 tokens"):
            decoder.submit([3, 4, 5], LENIENT["lenient greedy"], draft_length="3+5")
        with pytest.raises(RequestError, match="at most 8 together"):
            decoder.submit([3, 4, 5], RULES["coupled"], draft_length="4+5")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rule", "comb", "least"), [("greedy", "6+2", 1.1), ("coupled", "5+3", 1.1), ("tokenwise", "6+2", 1.0)]
)
def test_a_comb_of_the_demo_pair_keeps_more_than_a_line_of_as_many_proposals(
    demo: Pair, rule: str, comb: str, least: float
):
    plain, kept = replace(RULES[rule], max_new_tokens=96, top_k=0, top_p=1.0), {}
    with Decoder.open(demo.bundle) as decoder:
        prompts = bench_prompts("python", decoder.vocab_size)
        for length in (8, comb):
            total = Speculation()
            for seed in range(3):
                params = [replace(plain, seed=10 * seed + i) for i in range(len(prompts))]
                for output in decoder.generate(prompts, params, draft_length=length):
                    total.add(output.speculation)
            kept[length] = total.tokens_per_round
    assert kept[comb] >= least * kept[8], kept


def test_a_comb_of_other_than_whole_numbers_is_refused():
    for length, siblings in ((5.0, 3), ("5", 3), (5, True)):
        with pytest.raises(RequestError, match=r"of a comb is .*, expected a whole number"):
            CombLength(length, siblings)


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
    ("tokens", "line", "sizes", "comb", "others"),
    [(600, 0, (100, 108), "16+48", (10, 130)), (128, 16, (10, 28), "4+12", (10, 28))],
    ids=["wide", "beside"],
)
def test_a_comb_beside_a_line_stays_within_the_bytes_of_the_caches(
    llama: Pair, tokens: int, line: int, sizes: tuple[int, int], comb: str, others: tuple[int, int]
):
    """A round is as wide as the longest line and the most siblings together, whosever they are."""
    with Decoder.open(llama.bundle) as decoder:
        budget = bytes_for(tokens, decoder)
    with Decoder.open(llama.bundle, cache_bytes=budget) as decoder:
        requests = [
            decoder.submit(
                [3] * prompt, replace(RULES["greedy"], max_new_tokens=count), draft_length=length, drafter="random"
            )
            for (prompt, count), length in ((sizes, line), (others, comb))
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
