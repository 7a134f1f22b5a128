"""Texts behind a source are what they are: with any draft, beside any neighbour, after a hit and after preemption."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trt_spec.engines import PREFILL_WIDTH, Bundle, EngineError, RequestError
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.full import CacheFull
from trt_spec.runtime.sources.encoder import Encoder
from trt_spec.runtime.state.shapes import comb, tree

from ...kit.source_models import END, START, example_sources, said_by_transformers

TOKENS = 24
GREEDY = SamplingParams(max_new_tokens=TOKENS, min_tokens=TOKENS)
KINDS = ("t5", "whisper")
DRAFTED = [
    ("model", 4),  # which shares the target's encoder,
    ("model2", 4),  # has its own,
    ("model3", 2),  # or has none
    ("model", comb(3, 3)),
    ("model", tree(3, 5)),
    ("model+suffix", 3),
    ("lookup", 4),
    ("cascade", 4),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bundle(kind: str, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(kind)


def test_every_draft_gives_the_text_of_transformers(kind: str, bundle: Path) -> None:
    sources = example_sources(kind, 10)
    expected = said_by_transformers(kind, bundle.parent / "target", sources, TOKENS)
    with Decoder.open(bundle, max_batch=4) as decoder:
        for drafter, length in DRAFTED:
            outputs = decoder.generate(sources=sources, params=GREEDY, drafter=drafter, draft_length=length)
            assert [list(output.token_ids) for output in outputs] == expected, (drafter, length)
        assert decoder.by_drafter["model"].acceptance > 0.6
        assert decoder.by_drafter["model2"].acceptance > 0.5


def test_a_sampled_text_goes_by_its_seed_and_its_source_alone(kind: str, bundle: Path) -> None:
    sources = example_sources(kind, 6)
    params = [SamplingParams(max_new_tokens=TOKENS, temperature=0.8, seed=seed, rule="coupled") for seed in range(6)]
    with Decoder.open(bundle, max_batch=1) as decoder:
        alone = decoder.generate(sources=sources, params=params, draft_length=0)
    with Decoder.open(bundle, max_batch=4) as decoder:
        together = decoder.generate(sources=sources, params=params, drafter="model", draft_length=4)
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]
    assert len({one.token_ids for one in alone}) > 1


def test_a_request_that_gives_up_its_place_hears_its_source_again(kind: str, bundle: Path) -> None:
    sources = example_sources(kind, 6)
    long = SamplingParams(max_new_tokens=80, min_tokens=80)
    with Decoder.open(bundle, max_batch=1) as decoder:
        expected = decoder.generate(sources=sources, params=long, draft_length=0)
    with Decoder.open(bundle, max_batch=4) as decoder:
        requests = [decoder.submit(source=source, params=long, drafter="model", draft_length=2) for source in sources]
        preempted = 0
        for turn in range(10_000):
            if not decoder.step():
                break
            if turn % 5 == 4 and len(decoder.live) > 1:
                with decoder.between_rounds():
                    decoder._scheduler.seating.preempt(CacheFull("somebody else needs the memory"))
                preempted += 1
        assert preempted > 3
    assert [request.output().token_ids for request in requests] == [one.token_ids for one in expected]


def test_prefixes_are_found_by_requests_with_the_same_source_alone(kind: str, bundle: Path) -> None:
    one, other = example_sources(kind, 2)
    prompt = [START, *range(3, 63), *range(3, 33)]
    params = SamplingParams(max_new_tokens=8)
    with Decoder.open(bundle) as decoder:
        expected = [decoder.generate([prompt], params, sources=[source])[0] for source in (one, other)]
    with Decoder.open(bundle, prefix_bytes=2**22) as decoder:
        found = [decoder.generate([prompt], params, sources=[source])[0] for source in (one, other, one, other)]
    assert [output.usage.cached_tokens for output in found] == [0, 0, 32, 32]
    assert [output.token_ids for output in found] == 2 * [output.token_ids for output in expected]


@pytest.mark.parametrize(("prefix_bytes", "runs"), [(None, 3), (2**24, 2)])
def test_a_source_that_is_kept_is_not_read_again(
    kind: str, bundle: Path, prefix_bytes: int | None, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = example_sources(kind, 2)
    with Decoder.open(bundle, prefix_bytes=prefix_bytes) as decoder:
        encoder = decoder._scheduler._encoders[0]
        made, ran = Encoder._made_of, []
        monkeypatch.setattr(Encoder, "_made_of", lambda self, source: ran.append(self) or made(self, source))
        for source in (one, one, other, one):
            decoder.generate(sources=[source], params=SamplingParams(max_new_tokens=2))
    assert ran.count(encoder) == runs


def test_what_was_made_of_a_source_is_found_by_requests_with_its_salt_alone(
    t5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [source] = example_sources("t5", 1)
    made, ran = Encoder._made_of, []
    with Decoder.open(t5, prefix_bytes=2**24) as decoder:
        encoder = decoder._scheduler._encoders[0]
        monkeypatch.setattr(Encoder, "_made_of", lambda self, source: ran.append(self) or made(self, source))
        for salt in ("one", "other", "one"):
            request = decoder.submit(source=source, params=SamplingParams(max_new_tokens=2), cache_salt=salt)
            while not request.finished:
                decoder.step()
        assert ran.count(encoder) == 2
    assert not encoder._rows  # what is closed holds no memory
    assert not encoder._kept


def test_the_encoder_of_a_draft_reads_nothing_until_a_request_uses_that_draft(
    kind: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = example_sources(kind, 4)
    made, ran = Encoder._made_of, []
    monkeypatch.setattr(Encoder, "_made_of", lambda self, some: ran.extend([self] * len(some)) or made(self, some))
    with Decoder.open(bundle, max_batch=4) as decoder:
        plain = decoder.generate(sources=sources, params=GREEDY, draft_length=0)
        own, others = decoder._scheduler._encoders
        for drafter in ("model", "model3", "lookup", "suffix"):
            decoder.generate(sources=sources, params=GREEDY, drafter=drafter, draft_length=3)
        assert set(ran) == {own}
        requests = [decoder.submit(source=one, params=GREEDY, draft_length=0) for one in sources]
        for _ in range(6):
            decoder.step()
        requests[1].draft(3, "model2")  # in the midst of its text: all that are live hear, since its steps run in all
        while decoder.step():
            pass
        assert ran.count(others) == 4
        assert decoder.by_drafter["model2"].acceptance > 0.5
    assert [request.output().token_ids for request in requests] == [one.token_ids for one in plain]


def test_sources_of_one_width_are_read_together_with_the_bits_of_each_alone(
    t5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [[5 + (7 * place + number) % 50 for place in range(10 + number)] for number in range(5)]
    sources += [[9] * 30, [8] * 20]
    made, ran = Encoder._made_of, []
    monkeypatch.setattr(Encoder, "_made_of", lambda self, some: ran.append(some) or made(self, some))
    with Decoder.open(t5, max_batch=8) as decoder:
        together = decoder.generate(sources=sources, params=GREEDY, draft_length=0)
        assert [[len(one.source.ids) for one in some] for some in ran] == [[10, 11, 12, 13, 14], [30, 20]]
        encoder = decoder._scheduler._encoders[0]
        for some in list(ran):
            for one, whole in zip(some, made(encoder, some), strict=True):
                [alone] = made(encoder, [one])
                assert all(torch.equal(a, b) for name in whole for a, b in zip(whole[name], alone[name], strict=True))
    with Decoder.open(t5, max_batch=1) as decoder:
        alone = decoder.generate(sources=sources, params=GREEDY, draft_length=0)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_more_sources_than_the_budget_are_read_one_after_another(t5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ran = Encoder._made_of, []
    monkeypatch.setattr(Encoder, "_made_of", lambda self, some: ran.append(len(some)) or made(self, some))
    with Decoder.open(t5, max_batch=8) as decoder:
        sources = [[5 + number] * 100 for number in range(6)]
        decoder.generate(sources=sources, params=SamplingParams(max_new_tokens=1), draft_length=0)
    assert sum(ran) == 6
    assert 1 < max(ran) <= PREFILL_WIDTH // 112, "of 100 tokens each, padded to 112"


def test_a_text_begins_as_the_model_begins_and_goes_on_behind_a_prompt(t5: Path) -> None:
    [source] = example_sources("t5", 1)
    params = SamplingParams(max_new_tokens=4)
    with Decoder.open(t5) as decoder:
        request = decoder.submit(source=source, params=params)
        assert request.prompt == (START,)
        assert decoder.submit("ab", params, source=source).prompt == (START, *decoder.tokenizer.encode("ab").ids)
        assert decoder.submit([5, 6], params, source=source).prompt == (5, 6)
        by_text = decoder.submit(source="abc", params=params)
        assert by_text.source is not None
        assert by_text.source.ids == tuple(decoder.tokenizer.encode("abc").ids)
        assert next(iter(decoder.stream(source=source, params=params))).token_ids


def test_what_is_never_to_be_said_is_not_said(t5: Path) -> None:
    sources = example_sources("t5", 8)
    with Decoder.open(t5) as decoder:
        banned = decoder.bundle.tokenizer.unsaid_ids
        assert banned
        bias = SamplingParams(max_new_tokens=8, logit_bias=dict.fromkeys(banned, 90.0))
        assert not any(set(one.token_ids) & set(banned) for one in decoder.generate(sources=sources, params=bias))


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("t5", None, "the target of bundle .* needs a source; give one"),
        ("t5", [], "the source has 0 tokens, expected 1 to 2,048"),
        ("t5", [3] * 2049, "the source has 2,049 tokens, expected 1 to 2,048"),
        ("t5", [64], "source token id 64 is outside the vocabulary of 64 tokens"),
        ("t5", 5, "the source is a int, expected text or a list of token ids"),
        ("t5", torch.zeros(4), "the source is a Tensor, expected text or a list of token ids"),
        ("whisper", "text", "the source is a str, expected samples of sound, 16,000 a second"),
        ("whisper", [[0.0, 1.0]], "the source has samples .*, expected one channel of finite numbers"),
        ("whisper", [float("nan")], "the source has samples .*, expected one channel of finite numbers"),
        ("whisper", [0.0] * 9601, "the source has 0.60 s of sound, expected at most 0.6 s"),
        ("whisper", [], "the source has 0.00 s of sound"),
        ("whisper", [object()], "the source is a list, expected samples of sound"),
    ],
    indirect=["kind"],
)
def test_a_source_that_cannot_be_read_is_refused_by_name(bundle: Path, source: object, reason: str) -> None:
    with Decoder.open(bundle) as decoder, pytest.raises(RequestError, match=reason) as refused:
        decoder.submit(source=source)
    assert refused.value.field == "source"


def test_a_source_for_a_target_without_an_encoder_is_refused(llama) -> None:
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match=r"has no encoder .* leave it out"):
        decoder.submit([5], source="text")


def test_an_encoder_whose_weights_an_engine_lacks_is_refused_by_name(t5: Path) -> None:
    opened = Bundle.open(t5)
    encoders = {name: replace(one, weights="nvfp4") for name, one in opened.encoders.items()}
    with pytest.raises(EngineError, match="engine onnxruntime has no kernels for nvfp4, in which the encoder has its"):
        Decoder.open(replace(opened, encoders=encoders))


def test_sources_take_part_of_the_budget(t5: Path) -> None:
    with (
        pytest.raises(RequestError, match="need more cache than cache_bytes allows"),
        Decoder.open(t5, cache_bytes=2**20) as decoder,
    ):
        decoder.submit(source=[5], params=SamplingParams(max_new_tokens=100))


def test_a_text_may_end(t5: Path) -> None:
    sources = example_sources("t5", 20)
    with Decoder.open(t5) as decoder:
        params = SamplingParams(max_new_tokens=100, temperature=1.0, seed=1)
        outputs = decoder.generate(sources=sources, params=params, drafter="model", draft_length=3)
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    assert any(END in output.token_ids for output in outputs)
