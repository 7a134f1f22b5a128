"""A target that recalls says what the engine says, and computes each context once."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from trt_spec.engines import Step, blank_step
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.certificate import recalled
from trt_spec.tools.certificate.first_tokens import DEPTH, Tokens
from trt_spec.tools.certificate.probe import Probes
from trt_spec.tools.certificate.recalled import RecallingDecoder, RecallingEngine, recalls
from trt_spec.tools.certificate.subject import Choice, Subject, shapes

from ...kit.bundles import Pair

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


@pytest.mark.parametrize("rule", ["coupled", "tokenwise"])
def test_the_first_tokens_of_lines_combs_and_trees_are_those_that_the_engine_gives(
    subject: Subject, recalling: Decoder, rule: str
):
    """Under rejection a block may also end elsewhere by what lies after the tokens that count, which is as right."""
    with subject.open(capture=False) as decoder:
        for choice in [choice for name in decoder.drafters for choice in shapes(decoder, name)]:
            assert first_tokens(recalling, choice, rule) == first_tokens(decoder, choice, rule), choice


def test_after_each_path_of_a_tree_it_says_what_the_engine_says(subject: Subject, recalling: Decoder):
    step = tree_step(recalling)
    step.run()
    with Probes(subject) as probes:
        expected = torch.stack([probes["target"].logits(context) for context in ([7], [7, 8], [7, 9], [7, 9, 6])])
    torch.testing.assert_close(step.logits[0, :, : expected.shape[1]], expected, rtol=0, atol=subject.rounding)


def test_after_a_token_at_another_position_than_behind_its_ancestors_all_are_alike(recalling: Decoder):
    step = tree_step(recalling)
    step.inputs["depths"][0, 2] = 2  # its column
    step.run()
    assert [float(one.std()) > 0 for one in step.logits[0]] == [True, True, False, True]


def tree_step(decoder: Decoder) -> Step:
    """Two tokens after the first, and one after the second of them."""
    step = blank_step(decoder.target.engine, decoder.target.cache.everything, 0, 1, 4, 4)
    step.input_ids[0] = torch.tensor([7, 8, 9, 6])
    step.inputs["depths"][0] = torch.tensor([0, 1, 1, 2])
    step.inputs["ancestors"][0] = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    return step


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


def test_engines_are_closed_if_the_target_cannot_be_replaced(subject: Subject, monkeypatch: pytest.MonkeyPatch):
    closed = []
    monkeypatch.setattr(OnnxRuntimeEngine, "close", lambda self: closed.append(self))
    monkeypatch.setattr(recalled, "Model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace(subject, decoder=RecallingDecoder).open()
    assert len(closed) == 2


def test_an_engine_without_trees_runs_itself(subject: Subject, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OnnxRuntimeEngine, "takes_trees", False)
    with replace(subject, decoder=RecallingDecoder).open() as decoder:
        assert not recalls(decoder)
