"""Under a grammar every text is of its language, is the one without speculation, and has the right distribution."""

import gc
import importlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper
from trt_spec.engines.errors import counted
from trt_spec.runtime import Decoder, EntropyRule, Grammar, Request, RequestError, SamplingParams
from trt_spec.runtime.acceptance.accept import residual
from trt_spec.runtime.acceptance.filters.grammar import Allowed, exclude, unpacked
from trt_spec.runtime.acceptance.seat import follow_guide
from trt_spec.runtime.acceptance.transform import draft_transform, transform
from trt_spec.runtime.grammars.guide import GUIDES, Guide, bytes_for
from trt_spec.runtime.state.proposal import Exam, Proposal, ProposedTokens

from ..kit.bundles import Pair, tiny_pair
from ..kit.chi_squared import p_value
from ..kit.grammars import AUTOMATON, EOS, NESTED, SPELLED, WORDS, state_after
from ..kit.models import tiny_llama
from ..kit.recorder import Recorder
from ..kit.sampled import FALSE_ALARM
from .states import make_plan, make_rows

acceptance = importlib.import_module("trt_spec.runtime.acceptance.accept")
drafters = importlib.import_module("trt_spec.runtime.round.propose")
round_ = importlib.import_module("trt_spec.runtime.round.round")

CHOICE = Grammar.choice(["alpha beta", "alpha 20", "gamma"])
PROMPTS = [[5, 6, 7, 8], [9, 30, 9, 31, 9], [40], [2, 3, 28, 2, 3, 28, 2, 3]]
GREEDY = SamplingParams(max_new_tokens=24)
COUPLED = replace(GREEDY, temperature=1.0, rule="coupled", seed=6)
PENALISED = replace(COUPLED, repetition_penalty=1.3, presence_penalty=0.4, top_k=9, top_p=0.9, logprobs=2)


@pytest.fixture(scope="module")
def decoder(llama: Pair) -> Iterator[Decoder]:
    with Decoder.open(llama.bundle, max_batch=8) as decoder:
        yield decoder


def run(decoder: Decoder, requests: list[Request]) -> None:
    while not all(request.finished for request in requests):
        decoder.step()


# The same text.


@pytest.mark.parametrize("params", [GREEDY, COUPLED, PENALISED], ids=["greedy", "coupled", "penalised"])
def test_every_drafter_writes_the_text_without_speculation_beside_rows_without_a_grammar(
    decoder: Decoder, params: SamplingParams
):
    settings = [replace(params, grammar=one) for one in (WORDS, NESTED, CHOICE, None)]
    asked = [(prompt, setting) for prompt in PROMPTS[:2] for setting in settings]
    expected = [decoder.generate([prompt], setting, draft_length=0)[0] for prompt, setting in asked]
    assert {output.finish_reason for output in expected} == {"stop", "length"}
    for drafter in decoder.drafters:
        for draft_length in (1, 4):
            outputs = decoder.generate(*map(list, zip(*asked, strict=True)), drafter=drafter, draft_length=draft_length)
            for found, alone in zip(outputs, expected, strict=True):
                assert (found.token_ids, found.finish_reason) == (alone.token_ids, alone.finish_reason), drafter
    rule = EntropyRule(shortest=0, longest=5, stop_above=0.8)
    outputs = decoder.generate(*map(list, zip(*asked, strict=True)), draft_length=rule, trace=True)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_a_row_alone_and_rows_of_several_drafters_share_nothing(decoder: Decoder):
    setting = replace(GREEDY, grammar=WORDS)
    expected = [decoder.generate([prompt], setting, draft_length=0)[0].token_ids for prompt in PROMPTS]
    requests = [
        decoder.submit(prompt, setting, drafter=drafter, draft_length=3)
        for prompt, drafter in zip(PROMPTS, ("model", "lookup", "ngram", "cascade"), strict=True)
    ]
    run(decoder, requests)
    assert [request.output().token_ids for request in requests] == expected


def test_rounds_with_a_grammar_are_not_recorded_and_say_the_same(llama: Pair, recorder: Recorder):
    with Decoder.open(llama.bundle, max_batch=2) as decoder:
        [plain] = decoder.generate([PROMPTS[0]], replace(GREEDY, grammar=WORDS), draft_length=4)
        assert recorder.launched == []
        decoder.generate([PROMPTS[0]], replace(GREEDY, ignore_eos=True), draft_length=4)
        assert sum(recorder.launched) > 0
        free = decoder.submit(PROMPTS[1], replace(GREEDY, ignore_eos=True, max_new_tokens=60), draft_length=4)
        for _ in range(4):
            decoder.step()
        before = sum(recorder.launched)
        request = decoder.submit(PROMPTS[0], replace(GREEDY, grammar=WORDS), draft_length=4)
        while not request.finished:
            decoder.step()
        assert sum(recorder.launched) <= before + 1, "but for the one that was in flight"
        assert request.output().token_ids == plain.token_ids
        run(decoder, [free])


# The language.


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A vocabulary with every byte, so that it can write JSON."""
    return tiny_pair(tiny_llama, tmp_path_factory.mktemp("signs"), noise=0.05, vocab=300)


def random_schema(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = dice.choice(["boolean", "integer", "null", "enum", "string"] + ["object", "array"] * (depth > 0))
    if kind == "enum":
        return {"enum": dice.sample(["a", "bc", 7, None, True, -1.5], 3)}
    if kind == "string":
        return {"type": "string", "maxLength": 4}
    if kind == "integer":
        return {"type": "integer", "minimum": 3, "maximum": 40}
    if kind == "object":
        fields = {name: random_schema(dice, depth - 1) for name in dice.sample("abcd", dice.randint(1, 2))}
        return {"type": kind, "properties": fields, "required": list(fields)[:1], "additionalProperties": False}
    if kind == "array":
        return {"type": kind, "items": random_schema(dice, depth - 1), "maxItems": 3}
    return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and all(name in value for name in schema["required"])
            and all(name in known and fits(one, known[name]) for name, one in value.items())
        )
    if kind == "array":
        return isinstance(value, list) and len(value) <= 3 and all(fits(one, schema["items"]) for one in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= 4
    if kind == "integer":
        return type(value) is int and 3 <= value <= 40
    return value is None if kind == "null" else isinstance(value, bool)


def test_what_finished_by_itself_is_json_that_fits_its_schema(signs: Pair):
    dice, finished = random.Random(5), 0
    with Decoder.open(signs.bundle, max_batch=8) as decoder:
        for batch in range(4):
            schemas = [random_schema(dice) for _ in range(8)]
            requests = [
                decoder.submit(
                    "x = ",
                    SamplingParams(
                        max_new_tokens=80,
                        temperature=dice.choice([0.0, 1.0, 1.5]),
                        rule=dice.choice(["rejection", "coupled"]),
                        seed=batch,
                        grammar=Grammar.json_schema(schema | {"x-guidance": {"whitespace_flexible": False}}),
                    ),
                    draft_length=dice.choice([0, 2, 4]),
                    drafter=dice.choice(decoder.drafters),
                )
                for schema in schemas
            ]
            run(decoder, requests)
            for request, schema in zip(requests, schemas, strict=True):
                output = request.output()
                if output.finish_reason == "stop":
                    finished += 1
                    assert fits(json.loads(output.text), schema), (schema, output.text)
                    assert output.token_ids[-1] == EOS
                else:
                    assert output.finish_reason == "length"
    assert finished >= 20


def test_the_most_tokens_cut_a_text_short(decoder: Decoder):
    [output] = decoder.generate([PROMPTS[0]], SamplingParams(max_new_tokens=4, grammar=CHOICE), draft_length=4)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 4
    assert any(text.startswith(output.text) for text in json.loads(CHOICE.text))


def test_a_stop_string_ends_a_text_before_its_grammar_does(decoder: Decoder):
    [output] = decoder.generate([PROMPTS[0]], SamplingParams(grammar=CHOICE, stop="a"), draft_length=4)
    assert output.finish_reason == "stop"
    assert output.text in ("", "g")


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_a_grammar_whose_tokens_are_all_banned_ends_its_own_request_by_an_error(decoder: Decoder, rule: str):
    """Where the ban comes into force, and not where a proposal only led there."""
    neighbour = replace(GREEDY, grammar=WORDS)
    [expected] = decoder.generate([PROMPTS[1]], neighbour, draft_length=0)
    for grammar, banned, before in ((Grammar.regex("ab+c"), "b", 1), (Grammar.regex("a|b"), "ab", 0)):
        bias = {ord(letter) - ord("a") + 2: -math.inf for letter in banned}
        for draft_length in (0, 3):
            params = SamplingParams(grammar=grammar, logit_bias=bias, temperature=1.0, rule=rule)
            request = decoder.submit(PROMPTS[0], params, draft_length=draft_length, drafter="random")
            other = decoder.submit(PROMPTS[1], neighbour, draft_length=4)
            run(decoder, [request, other])
            said = counted(before, "token")
            message = rf"the grammar cannot go on after {said} \(logit_bias bans all that it allows there\)"
            with pytest.raises(RequestError, match=message):
                request.output()
            assert len(request.token_ids) == before
            assert other.output().token_ids == expected.token_ids


def test_letters_that_the_vocabulary_lacks_end_a_request_by_an_error(decoder: Decoder):
    request = decoder.submit(PROMPTS[0], SamplingParams(grammar=Grammar.regex("aé")), draft_length=4)
    run(decoder, [request])
    with pytest.raises(
        RequestError,
        match=r"the grammar cannot go on after 1 token \(nothing can follow: the vocabulary lacks what it asks for\)",
    ):
        request.output()


def test_requests_that_leave_early_take_their_guides_along(decoder: Decoder):
    gc.collect()
    before = set(GUIDES)
    setting = replace(GREEDY, grammar=WORDS)
    requests = [decoder.submit(prompt, setting, draft_length=3) for prompt in PROMPTS * 3]
    decoder.step()
    decoder.step()
    assert len(set(GUIDES) - before) > 6
    for request in requests:
        decoder.cancel(request)
    decoder.step()
    gc.collect()
    assert set(GUIDES) == before, "though the requests themselves are still held"
    assert decoder.generate([PROMPTS[0]], replace(GREEDY, max_new_tokens=5), draft_length=3)


def test_copied_proposals_that_break_the_grammar_are_rejected_by_p_zero(decoder: Decoder):
    grammar = Grammar.regex("[b-e]*")
    params = SamplingParams(max_new_tokens=8, temperature=1.0, grammar=grammar, seed=4, logit_bias={3: 5.0})
    request = decoder.submit([2, 3, 2, 3, 2], params, drafter="lookup", draft_length=3, trace=True)
    run(decoder, [request])
    rounds = [one for one in request.output().trace if 2 in one.proposal]
    assert rounds
    for one in rounds:
        place = one.proposal.index(2)
        assert one.p[place] == 0
        assert one.accepted <= place


@pytest.mark.parametrize("vocab_size", [8, 64, 4096, 4099])
def test_masks_that_a_gpu_unpacks_are_those_that_numpy_unpacks(vocab_size: int):
    bits = np.random.default_rng(1).integers(0, 256, (2, 3, bytes_for(vocab_size)), np.uint8)
    scores = torch.randn(2, 3, vocab_size)
    expected = torch.where(unpacked(torch.from_numpy(bits), vocab_size), scores, -torch.inf)
    assert torch.equal(exclude(scores, bits), expected)
    assert 0 < expected.isfinite().float().mean() < 1
    assert bool(expected[0, 0, 5].isfinite()) == bool(bits[0, 0, 0] >> 5 & 1)


@pytest.mark.parametrize("score", [-0.0, 1e-40, 3.0, -math.inf, math.inf])
def test_scores_of_what_is_allowed_keep_every_bit_and_all_others_are_excluded(score: float):
    scores = torch.full((1, 1, 16), score)
    found = exclude(scores, np.array([[[0b101, 0, 0, 0]]], np.uint8)).flatten()
    expected = torch.full((16,), -math.inf)
    expected[[0, 2]] = score
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


# The distribution.

PROMPT = [2, 2]
PLAIN = SamplingParams(temperature=1.0, grammar=SPELLED)
FILTERED = replace(PLAIN, temperature=1.3, top_k=2, logit_bias={6: 0.7})


@torch.inference_mode()
def exact_distribution(pair: Pair, params: SamplingParams, depth: int) -> dict[tuple[int, ...], float]:
    """By transformers in float64; an own automaton says what is allowed."""
    warpers = [TemperatureLogitsWarper(params.temperature)]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    joint = {(): 1.0}
    for _ in range(depth):
        longer = {}
        for prefix, share in joint.items():
            state = state_after(prefix)
            assert state is not None
            scores = pair.exact(torch.tensor([[*PROMPT, *prefix]])).logits[:, -1].double()
            scores = torch.where(torch.tensor([token in AUTOMATON[state] for token in range(8)]), scores, -torch.inf)
            for token, bias in params.logit_bias.items():
                scores[:, token] += bias
            for warper in warpers:
                scores = warper(None, scores)
            longer |= {(*prefix, token): share * p for token, p in enumerate(scores.softmax(-1)[0].tolist()) if p > 0}
        joint = longer
    return joint


def p_value_of(
    pair: Pair, params: SamplingParams, samples: int, k: int, drafter: str = "model", depth: int = 5
) -> float:
    """Of the first `depth` tokens; the first comes with the prompt, without a proposal."""
    with Decoder.open(pair.bundle, max_batch=256) as decoder:
        requests = [
            decoder.submit(PROMPT, replace(params, max_new_tokens=depth, seed=seed), draft_length=k, drafter=drafter)
            for seed in range(samples)
        ]
        run(decoder, requests)
        assert 0 < decoder.speculation.accepted < decoder.speculation.examined or k == 0, "both verdicts"
    said = Counter((*one.token_ids, *[EOS] * (depth - len(one.token_ids))) for one in requests)
    expected = exact_distribution(pair, params, depth)
    return p_value(said, expected | {cell: 0.0 for cell in said if cell not in expected})


@pytest.mark.parametrize(
    ("settings", "drafter", "rule"),
    [(FILTERED, "model", "rejection"), (PLAIN, "lookup", "rejection"), (PLAIN, "model", "coupled")],
)
def test_output_is_distributed_as_the_target_alone_under_the_grammar(
    eight: Pair, settings: SamplingParams, drafter: str, rule: str
):
    assert p_value_of(eight, replace(settings, rule=rule), 1_000, 2, drafter, depth=4) > FALSE_ALARM


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", ["model", "lookup", "suffix", "ngram", "random", "cascade"])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_every_drafter_is_lossless_under_a_grammar(eight: Pair, drafter: str, rule: str):
    for settings in (PLAIN, FILTERED, replace(FILTERED, draft_temperature=0.5)):
        assert p_value_of(eight, replace(settings, rule=rule), 3_000, 2, drafter) > FALSE_ALARM


def test_chi_squared_catches_masks_that_are_shifted_by_one(eight: Pair, monkeypatch: pytest.MonkeyPatch):
    allowed = Guide.allowed
    monkeypatch.setattr(Guide, "follow", lambda self, tokens: follow_blindly(self, tokens))

    def shifted(self: Guide, ahead: list[int], width: int) -> Any:
        found = allowed(self, ahead, width).copy()
        found[1:] = found[:-1].copy()
        return found

    monkeypatch.setattr(Guide, "allowed", shifted)
    assert p_value_of(eight, PLAIN, 300, 1, depth=3) < FALSE_ALARM


FOLLOW = Guide.follow


def follow_blindly(guide: Guide, tokens: list[int]) -> int:
    """Without the check of last resort, which would end the request."""
    FOLLOW(guide, tokens)
    guide.error = ""
    return len(tokens)


def unmasked(plan: Any) -> Any:
    return replace(plan, filters=tuple(one for one in plan.filters if not isinstance(one, Allowed)))


@pytest.mark.exhaustive
def test_chi_squared_catches_proposals_that_are_trimmed_as_if_they_had_not_been_made(
    eight: Pair, monkeypatch: pytest.MonkeyPatch
):
    """The trap: p itself decides where q had proposed what is not allowed."""
    monkeypatch.setattr(
        drafters, "draft_transform", lambda logits, rows, plan, ahead: transform(logits, rows, unmasked(plan), ahead)
    )
    judge = round_.accept

    def trimmed(exam: Exam) -> None:
        proposal = exam.proposal
        fits = exam.scores[:, :-1].gather(2, proposal.tokens[:, :, None])[:, :, 0].isfinite()
        count = torch.minimum(proposal.proposed, fits.long().cumprod(1).sum(1))
        judge(exam._replace(proposal=proposal._replace(proposed=count), plan=replace(exam.plan, ragged=True)))

    assert p_value_of(eight, PLAIN, 600, 1, depth=3) > FALSE_ALARM, "only p masked is lossless, too"
    monkeypatch.setattr(round_, "accept", trimmed)
    assert p_value_of(eight, PLAIN, 4_000, 1, depth=3) < FALSE_ALARM


def test_chi_squared_catches_a_q_masked_in_the_test_of_a_draft_that_sampled_unmasked(
    eight: Pair, monkeypatch: pytest.MonkeyPatch
):
    sample, weights = drafters.inverse_cdf, {}

    def masked_late(logits: Any, rows: Any, plan: Any, ahead: Any) -> Any:
        weights["true"] = transform(logits, rows, unmasked(plan), ahead).softmax(-1)[:, 0]
        return transform(logits, rows, plan, ahead)

    monkeypatch.setattr(drafters, "draft_transform", masked_late)
    monkeypatch.setattr(drafters, "inverse_cdf", lambda _, u: sample(weights["true"], u))
    assert p_value_of(eight, PLAIN, 600, 1, depth=3) < FALSE_ALARM


@pytest.mark.parametrize("masked_draft", [True, False])
@pytest.mark.parametrize("prefix", [(), (3,), (2, 5)])
def test_one_round_by_enumeration_gives_exactly_p_under_the_grammar(
    decoder: Decoder, masked_draft: bool, prefix: tuple[int, ...]
):
    """All proposals with their chance, accepted or replaced by the residual: together p, within float32's rounding."""
    guide = decoder._intake.grammars.guide(PLAIN)
    assert guide is not None
    assert guide.follow(prefix) == len(prefix)
    rows, plan = make_rows([PLAIN], 64), make_plan([PLAIN], 1)
    follow_guide(rows, 0, guide)
    generator = torch.Generator().manual_seed(3)
    target, draft = torch.randn(1, 2, 64, generator=generator), torch.randn(1, 1, 64, generator=generator)
    q = draft_transform(
        draft, rows, plan if masked_draft else unmasked(plan), ProposedTokens(torch.zeros(1, 0, dtype=torch.int64))
    )
    q = q.softmax(-1)
    total = torch.zeros(64)
    for token in range(64):
        tokens = torch.tensor([[token]])
        p = transform(target, rows, plan, ProposedTokens(tokens)).softmax(-1)
        share = q[0, 0, token]
        stands = torch.clamp(p[0, 0, token] / share, max=1) if share else torch.zeros(())
        left = residual(Proposal(tokens, torch.ones(1, dtype=torch.int64), q), p, torch.zeros(1, dtype=torch.int64))
        total[token] += share * stands
        total += share * (1 - stands) * (left / left.sum())[0]
    state = state_after(prefix)
    assert state is not None
    expected = torch.where(torch.tensor([token in AUTOMATON[state] for token in range(64)]), target[0, 0], -torch.inf)
    assert torch.allclose(total, expected.softmax(-1), atol=1e-6)
    assert (total[expected == -torch.inf] == 0).all()


def test_masks_of_the_draft_keep_the_acceptance_that_it_has_without_a_grammar(twin: Pair):
    """The draft is the target, so that whatever is drawn from the same masked scores is accepted."""
    params = SamplingParams(max_new_tokens=40, temperature=1.0, grammar=WORDS, seed=2)
    with Decoder.open(twin.bundle) as decoder:
        outputs = decoder.generate(PROMPTS, params, draft_length=4)
    assert all(output.speculation.acceptance == 1 for output in outputs)
