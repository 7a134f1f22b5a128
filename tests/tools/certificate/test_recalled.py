"""A target that recalls says what the engine says, and computes each context once."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.sampling.params import RULES
from trt_spec.tools.certificate.first_tokens import DEPTH, Tokens
from trt_spec.tools.certificate.recalled import RecallingDecoder, RecallingEngine
from trt_spec.tools.certificate.subject import Choice, Subject, shapes

from ...bundles import Pair

REQUESTS = 12


@pytest.fixture
def subject(llama: Pair, subject_of: Callable[..., Subject]) -> Subject:
    return subject_of(llama, batch=8)


@pytest.fixture
def recalling(subject: Subject) -> Iterator[Decoder]:
    with replace(subject, decoder=RecallingDecoder).open(capture=False) as decoder:
        yield decoder


def engine_of(decoder: Decoder) -> RecallingEngine:
    assert isinstance(decoder.target.engine, RecallingEngine)
    return decoder.target.engine


def first_tokens(decoder: Decoder, choice: Choice, rule: str) -> list[Tokens]:
    drafter, k = choice
    params = [
        SamplingParams(temperature=0.5, rule=rule, seed=seed, max_new_tokens=DEPTH, ignore_eos=True)
        for seed in range(REQUESTS)
    ]
    decoder.forget_outputs()
    outputs = decoder.generate([[7]] * REQUESTS, params, draft_length=k, drafter=drafter)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("rule", RULES)
def test_the_first_tokens_of_lines_combs_and_trees_are_those_that_the_engine_gives(
    subject: Subject, recalling: Decoder, rule: str
):
    """But a block of rule rejection may see what lies behind them, where other tokens are as right."""
    with subject.open(capture=False) as decoder:
        for choice in [choice for name in decoder.drafters for choice in shapes(decoder, name)]:
            found, expected = (first_tokens(one, choice, rule) for one in (recalling, decoder))
            same = sum(one == other for one, other in zip(found, expected, strict=True))
            assert same == REQUESTS or (rule == "rejection" and same >= REQUESTS // 2), choice


def test_each_context_is_computed_once_and_none_that_is_longer_than_what_counts(
    recalling: Decoder, monkeypatch: pytest.MonkeyPatch
):
    computed: Counter[Tokens] = Counter()
    model = engine_of(recalling)._model
    prefill = model.prefill

    def counting(rows: range, tokens: list[torch.Tensor]) -> torch.Tensor:
        computed.update(tuple(one.tolist()) for one in tokens)
        return prefill(rows, tokens)

    monkeypatch.setattr(model, "prefill", counting)
    for _ in range(2):
        first_tokens(recalling, ("model", 3), "tokenwise")
    assert set(computed.values()) == {1}
    assert {len(context) for context in computed} == {1, 2, 3} == set(range(1, DEPTH + 1))


def test_contexts_that_take_too_much_memory_are_forgotten(recalling: Decoder):
    engine = engine_of(recalling)
    expected = first_tokens(recalling, ("model", 3), "coupled")
    assert engine._known
    engine._most = 0
    assert first_tokens(recalling, ("model", 3), "coupled") == expected
    assert not engine._known


def test_a_wrong_entry_of_its_cache_is_a_wrong_context(subject: Subject, recalling: Decoder):
    greedy = SamplingParams(max_new_tokens=2, ignore_eos=True)
    request = recalling.submit([7], greedy, draft_length=0)
    recalling.step()
    recalling.target.cache.buffers["key_0"][0, 0, 0, 0] = 9
    recalling.step()
    first, second = request.output().token_ids
    with subject.open() as decoder:
        [other] = decoder.generate([[9, first]], replace(greedy, max_new_tokens=1), draft_length=0)
    assert other.token_ids == (second,)


def test_an_engine_without_trees_runs_itself(subject: Subject, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trt_spec.engines.onnxruntime.OnnxRuntimeEngine.takes_trees", False)
    with replace(subject, decoder=RecallingDecoder).open() as decoder:
        assert not isinstance(decoder.target.engine, RecallingEngine)
