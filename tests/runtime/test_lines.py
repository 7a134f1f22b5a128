"""Several lines of proposals in one round: the same texts and log-probs as without; what cannot be is refused."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from trt_spec.engines import EngineError
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import Decoder, EntropyRule, RequestError, SamplingParams, Speculation
from trt_spec.runtime.drafters import DRAFTERS
from trt_spec.runtime.scheduling import capture
from trt_spec.runtime.state.noise import MOST_LINES
from trt_spec.tools.measuring.shipped_prompts import bench_prompts

from ..bundles import Pair
from ..recorder import Recorder
from .scripted import ScriptedEngine, scripted_decoder
from .test_combs import RULES, SAMPLED, assert_same_logprobs, bytes_for, steps_within
from .test_greedy import random_prompts

LINES = ("model+random", "random+model", "lookup+model", "suffix+suffix2+lookup+lookup2", "random+suffix+model+lookup")
REPEATS = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]  # of which copies are found


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_the_text_is_that_of_plain_decoding(pairs, family: str, rule: str):
    prompts = [*random_prompts(64, [1, 2, 5, 23], seed=8), REPEATS]
    with Decoder.open(pairs(family).bundle) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, RULES[rule], draft_length=0)]
        for drafter in LINES:
            for length in (1, 4):
                found = decoder.generate(prompts, RULES[rule], draft_length=length, drafter=drafter)
                assert [one.token_ids for one in found] == expected, f"{drafter}, K {length}"
                [alone] = decoder.generate(prompts[-1], RULES[rule], draft_length=length, drafter=drafter)
                assert alone.token_ids == expected[-1], f"{drafter}, K {length}"
        assert decoder.speculation.accepted


@pytest.mark.parametrize("rule", RULES)
def test_a_line_among_several_lines_has_the_text_it_has_alone(llama: Pair, rule: str):
    """Nor does a comb, nor several lines, depend on what others have in the same round."""
    own, other = [5, 6, 7, 5, 6, 7], [9, 8, 7, 9, 8, 7]
    asked = [("model", 3), ("model", "3+2"), ("random+model", 3)]
    for drafter, length in asked:
        with Decoder.open(llama.bundle) as decoder:
            [alone] = decoder.generate([own], RULES[rule], draft_length=length, drafter=drafter)
        for other_drafter, beside in (*asked[1:], ("model+random+lookup", 16)):
            with Decoder.open(llama.bundle) as decoder:
                decoder.submit(other, replace(SAMPLED, max_new_tokens=60), draft_length=beside, drafter=other_drafter)
                request = decoder.submit(own, RULES[rule], draft_length=length, drafter=drafter)
                while not request.finished:
                    decoder.step()
            assert tuple(request.token_ids) == alone.token_ids, f"{drafter} {length} beside {other_drafter} {beside}"


def test_another_line_makes_rounds_longer(llama: Pair):
    rounds = {}
    with Decoder.open(llama.bundle) as decoder:
        for rule in ("tokenwise", "coupled"):
            for drafter in ("random", "model", "model+random"):
                params = [replace(RULES[rule], seed=seed, max_new_tokens=40, top_k=0, top_p=1.0) for seed in range(8)]
                outputs = decoder.generate([[3, 4, 5]] * 8, params, draft_length=2, drafter=drafter)
                rounds[rule, drafter] = sum(one.speculation.rounds for one in outputs)
            assert rounds[rule, "model+random"] < min(rounds[rule, "model"], rounds[rule, "random"])


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_round_keeps_what_the_best_of_its_lines_would_keep(drafts: Pair, rule: str):
    """That is all in which a line agrees with the text, which is the same whatever is proposed."""
    params = replace(RULES[rule], max_new_tokens=60, top_k=0)
    best: set[int] = set()
    with Decoder.open(drafts.bundle) as decoder:
        outputs = decoder.generate(
            [[3, 4, 5, 6], REPEATS], params, draft_length=4, drafter="model+lookup+model2", trace=True
        )
    for output in outputs:
        begun = 0
        for each in output.trace:
            rest = output.token_ids[begun:]
            lines = (each.proposal, *each.beside)
            agree = [
                next((i for i, token in enumerate(line) if rest[i : i + 1] != (token,)), len(line)) for line in lines
            ]
            if len(rest) > 4:
                assert each.accepted == max(agree)
                best.add(agree.index(max(agree[1:], default=0)) if max(agree) > agree[0] else 0)
            begun += each.accepted + 1
    assert best == {0}, "the trace tells of the best line first"


@pytest.mark.parametrize("rule", ["greedy", "coupled", "tokenwise", "rejection"])
def test_two_drafts_together_are_better_than_each_of_them(drafts: Pair, rule: str):
    rounds = {}
    with Decoder.open(drafts.bundle) as decoder:
        for drafter in ("model", "model2", "model+model2"):
            params = [replace(RULES[rule], seed=seed, max_new_tokens=60, top_k=0, top_p=1.0) for seed in range(8)]
            prompts = [[3, 4, seed] for seed in range(8)]
            outputs = decoder.generate(prompts, params, draft_length=2, drafter=drafter)
            rounds[drafter] = sum(one.speculation.rounds for one in outputs)
    assert rounds["model+model2"] < min(rounds["model"], rounds["model2"]), rounds


@pytest.mark.parametrize("rule", RULES)
def test_a_line_with_nothing_to_copy_is_no_line(llama: Pair, rule: str):
    """Beside a source that finds nothing, the other is as alone: text, counts and what its draft reads."""
    with Decoder.open(llama.bundle) as decoder:
        alone, beside = (
            decoder.generate([[3, 4, 5]], replace(RULES[rule], max_new_tokens=3), draft_length=2, drafter=drafter)[0]
            for drafter in ("model", "suffix+model")
        )
    assert alone.token_ids == beside.token_ids
    assert alone.speculation.outcomes == beside.speculation.outcomes


def test_log_probs_are_those_of_the_line_that_stands(llama: Pair):
    params = replace(RULES["greedy"], logprobs=2)
    with Decoder.open(llama.bundle) as decoder:
        plain, several = (
            decoder.generate([[3, 4, 5]], params, draft_length=length, drafter=drafter)[0]
            for length, drafter in ((0, "none"), (3, "random+model"))
        )
    assert_same_logprobs(several, plain)


@pytest.mark.parametrize("rule", RULES)
def test_a_trace_tells_of_all_lines(llama: Pair, rule: str):
    """The line that went furthest, with its own p and q, and the tokens of the others."""
    with Decoder.open(llama.bundle) as decoder:
        params = replace(RULES[rule], max_new_tokens=60, top_k=0, top_p=1.0)
        outputs = decoder.generate([[3, 4, 5], REPEATS], params, draft_length=3, drafter="random+model", trace=True)
        combs = decoder.generate([[3, 4, 5], [9, 8]], params, draft_length="3+2", trace=True)
    kept = set()
    for one in (*outputs, *combs):
        said = [token for each in one.trace for token in (*each.standing, each.next_token) if token is not None]
        assert said == list(one.token_ids)
    for one in outputs:
        for each in one.trace:
            assert len(each.standing) == each.accepted
            assert len(each.p) == len(each.q) == len(each.proposal) <= 3
            assert len(each.beside) <= 1
            assert not each.siblings
            assert all(0 < q <= 1 and 0 <= p <= 1 for p, q in zip(each.p, each.q, strict=True))
            if each.accepted and each.beside:
                kept.add(each.q[0] == pytest.approx(1 / decoder.vocab_size))
    assert kept == {True, False} or rule == "greedy", "both lines went furthest at times"


def test_a_request_turns_from_several_lines_to_one_and_back(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        [expected] = decoder.generate([[3, 4, 5]], replace(RULES["greedy"], max_new_tokens=60), draft_length=0)
        request = decoder.submit([3, 4, 5], replace(RULES["greedy"], max_new_tokens=60), draft_length="2+3")
        turns = ((3, "model+random"), ("1+2", "random"), (2, "lookup+model"), (4, "model"), (0, "none"))
        for length, drafter in turns * 5:
            decoder.step()
            if not request.finished:
                request.draft(length, drafter)
        while not request.finished:
            decoder.step()
    assert tuple(request.token_ids) == expected.token_ids


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_the_drafts_cache_claims_no_entry_of_another_line(llama: Pair, rule: str):
    """After each round the draft's entries are those of the committed tokens, as a fresh reading writes them."""
    params = replace(RULES[rule], max_new_tokens=40)
    with Decoder.open(llama.bundle) as decoder:
        request = decoder.submit([3, 4, 5], params, draft_length=3, drafter="random+model")
        beside = decoder.submit(REPEATS, params, draft_length=3, drafter="model+lookup")
        cascade = decoder.submit(REPEATS, params, draft_length=3, drafter="cascade")
        compared = 0
        while decoder.step():
            for row, one in enumerate((request, beside, cascade)):
                entries = 0 if one.finished else decoder.draft.cache.entries[row]
                if not entries or row >= len(decoder.live) or decoder.live[row].request is not one:
                    continue
                tokens = torch.tensor([*one.prompt, *one.token_ids])[:entries]
                name = decoder.draft.engine.contract.cache_names[-1]
                found = decoder.draft.cache.read(row, name)[:, :entries].clone()
                with Decoder.open(llama.bundle) as fresh, torch.inference_mode():
                    fresh.draft.prefill([0], [tokens])
                    expected = fresh.draft.cache.read(0, name)[:, :entries]
                    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared > 10


def test_the_draft_reads_what_another_line_has_proposed_within_its_own_first_step(llama: Pair):
    """No step of its own is spent on it: as many steps of the draft as proposals, whichever line stands."""
    with Decoder.open(llama.bundle) as decoder:
        params = replace(RULES["coupled"], max_new_tokens=60, top_k=0)
        request = decoder.submit([3, 4, 5, 6, 7, 8], params, draft_length=3, drafter="random+model", trace=True)
        decoder.step()
        widths, prefill = [], decoder.draft.prefill
        decoder.draft.prefill = lambda rows, tokens: (widths.append(rows), prefill(rows, tokens))[1]
        while decoder.step():
            pass
        stood = {one.accepted for one in request.output().trace}
    assert stood >= {0, 1, 2}
    assert not widths


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


@pytest.mark.parametrize("beside", ["model", "lookup"])
def test_beside_several_lines_a_single_one_costs_its_draft_no_step_of_its_own(llama: Pair, beside: str):
    with Decoder.open(llama.bundle) as decoder:
        params = replace(RULES["coupled"], max_new_tokens=60, top_k=0)
        drafter = "random+model" if beside == "model" else "lookup+random"
        decoder.submit([3, 4, 5, 6, 7, 8], params, draft_length=2, drafter=drafter)
        decoder.submit([9, 8, 7, 6, 5, 4], params, draft_length=4, drafter="model")
        decoder.step()
        widths, prefill = [], decoder.draft.prefill
        decoder.draft.prefill = lambda rows, tokens: (widths.append(rows), prefill(rows, tokens))[1]
        while len(decoder.live) == 2:
            decoder.step()
        assert decoder.speculation.rounds > 10
    assert not widths


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


def test_several_lines_stay_within_the_bytes_of_the_caches(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        budget = bytes_for(300, decoder)
    with Decoder.open(llama.bundle, cache_bytes=budget) as decoder:
        requests = [
            decoder.submit([3] * 10, replace(RULES["greedy"], max_new_tokens=60), draft_length=16, drafter=drafter)
            for drafter in ("random", "random+model+lookup", "model")
        ]
        steps_within(300, decoder)
        assert all(request.output().finish_reason == "length" for request in requests)


@pytest.mark.parametrize(
    ("drafter", "length", "params", "message"),
    [
        ("model+model", 4, {}, "drafter model+model names a source twice; name each once"),
        ("model+cascade", 4, {}, "drafter model+cascade has a line of cascade, which goes with no other"),
        ("model+none", 4, {}, "drafter is 'model+none', expected one of"),
        ("model+", 4, {}, "drafter is 'model+', expected one of"),
        ("mixed+model", "auto", {}, "drafter is 'mixed+model', expected one of"),
        (
            "model+random",
            17,
            {},
            "draft_length is 17, expected a whole number from 0 to 16 for each source",
        ),
        ("model+random", "auto", {}, "draft_length is 'auto', expected a whole number from 0 to 16"),
        ("model+random", "3+3", {}, "draft_length is 3+3, expected a whole number"),
        ("model+random", EntropyRule(), {}, "draft_length is EntropyRule"),
    ],
)
def test_what_several_lines_cannot_be_is_refused(llama: Pair, drafter: str, length: object, params: dict, message: str):
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match=re.escape(message)):
        decoder.submit([3, 4, 5], SamplingParams(**params), draft_length=length, drafter=drafter)


def test_more_lines_than_a_round_may_have_are_refused(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    names = [name for name in DRAFTERS if name != "cascade"]
    drafter = "+".join(names[: MOST_LINES + 1])
    with Decoder.open(llama.bundle) as decoder:
        monkeypatch.setattr(decoder._rules, "unavailable", {})
        with pytest.raises(RequestError, match=rf"names {MOST_LINES + 1} sources, expected at most {MOST_LINES}"):
            decoder.submit([3, 4, 5], draft_length=1, drafter=drafter)


def test_without_a_length_lines_are_as_long_as_a_narrow_engine_takes(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 5)
    with Decoder.open(llama.bundle) as decoder:
        assert decoder.submit([3, 4, 5], RULES["coupled"], drafter="model+random").draft_length == 2


def test_a_draft_with_narrow_steps_reads_what_it_lacks_before_the_round(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    """As on plans of TensorRT without trees of drafts: none of its steps is wider than two."""
    with Decoder.open(llama.bundle) as decoder:
        monkeypatch.setattr(decoder.draft.engine, "verify_width", 1)
        params = replace(RULES["coupled"], max_new_tokens=40)
        expected = decoder.generate([[3, 4, 5], REPEATS], params, draft_length=0)
        found = decoder.generate([[3, 4, 5], REPEATS], params, draft_length=4, drafter="random+model")
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert decoder.last_frame.window is None
        assert decoder.speculation.accepted


def test_a_narrow_engine_takes_lines_that_fit(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    """Beside longer lines of others a row has fewer: its text depends on none of them."""
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 9)
    with Decoder.open(llama.bundle) as decoder:
        prompts = [[3, 4, 5], [9, 8, 7]]
        alone = [one.token_ids for one in decoder.generate(prompts, RULES["coupled"], draft_length=0)]
        several = decoder.submit(prompts[0], RULES["coupled"], draft_length=4, drafter="model+random")
        line = decoder.submit(prompts[1], RULES["coupled"], draft_length=6)
        widths = set()
        while decoder.step():
            widths.add(decoder.last_frame.verify.input_ids.shape[1])
        assert max(widths) <= 9
        assert [tuple(one.token_ids) for one in (several, line)] == alone
        with pytest.raises(RequestError, match=r"needs steps of 17 tokens .* at most 9; use rule coupled"):
            decoder.submit([3, 4, 5], SAMPLED, draft_length=4, drafter="model+random")
        with pytest.raises(RequestError, match="a whole number from 0 to 4 for each source"):
            decoder.submit([3, 4, 5], RULES["coupled"], draft_length=5, drafter="model+random")


def test_the_order_of_the_names_does_not_matter_to_the_text(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        texts = {
            decoder.generate([REPEATS], RULES["coupled"], draft_length=3, drafter="+".join(names))[0].token_ids
            for names in permutations(("model", "random", "lookup"))
        }
    assert len(texts) == 1


@pytest.mark.exhaustive
def test_greedy_text_of_the_demo_pair_is_worth_a_line_of_copies(demo: Pair):
    """With as many proposals; the table in tools/README.md has the numbers."""
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
