"""A draft with tokens of its own reads its target's text in these: no text and no distribution depends on it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from trt_spec.engines import Bundle, RequestError
from trt_spec.engines.bundle import FOREIGN
from trt_spec.runtime import Decoder, Grammar, SamplingParams
from trt_spec.runtime.memory.full import CacheFull
from trt_spec.tools.certificate.effort import QUICK
from trt_spec.tools.certificate.probe import Probes
from trt_spec.tools.certificate.rollback import Worst, compare_all, random_rounds
from trt_spec.tools.certificate.subject import Subject

from ...kit.bundles import Pair, export_pair
from ...kit.caches import TOLERANCE
from ...kit.exact import PLAIN, PROMPT, exact_distribution
from ...kit.foreign import in_other_tokens, merging_draft
from ...kit.prompts import random_prompts
from ...kit.recorder import Recorder
from ...kit.sampled import Tokens, is_distributed_as

WAYS = ("common", "text")
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
COUPLED = replace(GREEDY, temperature=0.9, rule="coupled", seed=5)
REJECTION = replace(GREEDY, temperature=0.9, seed=5)
PROMPTS = random_prompts(64, [1, 4, 19, 40, 70], seed=3)


@pytest.fixture(scope="module")
def renumbered(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The draft is the target, with its tokens in another order."""
    folder = tmp_path_factory.mktemp("renumbered")
    return export_pair(llama.checkpoint, folder / "bundle", in_other_tokens(llama.checkpoint, folder / "draft"))


@pytest.fixture(scope="module")
def few(eight: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Of the eight tokens of its target a draft knows all but two letters, and it merges others."""
    folder = tmp_path_factory.mktemp("few")
    return export_pair(eight.checkpoint, folder / "bundle", merging_draft(folder / "draft", b"abcd", b"ab"))


@pytest.fixture
def decoder(merging: Pair) -> Iterator[Decoder]:
    with Decoder.open(merging.bundle, max_batch=4) as decoder:
        yield decoder


def test_what_the_target_would_say_itself_is_accepted_whatever_its_number(renumbered: Pair):
    """Special tokens, too, which these random models often say: they are told by what they are for."""
    with Decoder.open(renumbered.bundle, max_batch=4) as decoder:
        assert decoder.drafters[:2] == ("common", "text")
        plain = decoder.generate(PROMPTS, GREEDY, draft_length=0)
        assert {0, 1} & {token for output in plain for token in output.token_ids}
        for drafter in WAYS:
            for output, expected in zip(
                decoder.generate(PROMPTS, GREEDY, draft_length=4, drafter=drafter), plain, strict=True
            ):
                assert output.token_ids == expected.token_ids
                assert output.speculation.acceptance == 1.0, drafter
        for params in (COUPLED, REJECTION):
            outputs = decoder.generate(PROMPTS, params, draft_length=4, drafter="common")
            assert [output.speculation.acceptance for output in outputs] == [1.0] * len(PROMPTS)


@pytest.mark.parametrize(
    ("engine", "params"),
    [("onnxruntime", GREEDY), ("onnxruntime", COUPLED), ("openvino", COUPLED), ("torch", COUPLED)],
    ids=["onnxruntime-greedy", "onnxruntime-coupled", "openvino-coupled", "torch-coupled"],
)
def test_greedy_and_coupled_texts_are_plain_ones(merging: Pair, engine: str, params: SamplingParams):
    asked = [("common", 1), ("text", 4), ("common", 9)]
    if engine == "onnxruntime":
        asked += [("common+text", 2), ("text+common", 3), ("suffix+common", 4), ("text+lookup", 5)]
    prompts = PROMPTS if engine != "torch" else PROMPTS[2:3]  # which converts the graph for each shape
    with Decoder.open(merging.bundle, engine, max_batch=len(asked)) as decoder:
        for prompt in prompts:
            [expected] = decoder.generate([prompt], params, draft_length=0)
            requests = [
                decoder.submit(prompt, params, draft_length=length, drafter=drafter) for drafter, length in asked
            ]
            while decoder.step():
                pass
            assert [tuple(request.token_ids) for request in requests] == [expected.token_ids] * len(requests)
        assert all(decoder.by_drafter[drafter].proposed for drafter in WAYS)


def test_rounds_that_are_recorded_write_the_same_text(merging: Pair, recorder: Recorder):
    with Decoder.open(merging.bundle, max_batch=3) as decoder:
        for params in (GREEDY, COUPLED):
            plain = decoder.generate(PROMPTS[:3], params, draft_length=0)
            for drafter in WAYS:
                before = sum(recorder.launched)
                outputs = decoder.generate(PROMPTS[:3], params, draft_length=3, drafter=drafter)
                assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
                assert sum(recorder.launched) > before + 20


def test_its_cache_is_that_of_a_fresh_prefill_of_its_own_tokens(merging: Pair):
    """Requests turn from one drafter to another, are cancelled and move, and rows roll back in every pattern."""
    subject = Subject(Bundle.open(merging.bundle), "onnxruntime", "cpu", batch=4)
    with Probes(subject) as fresh, Decoder.open(merging.bundle, max_batch=4) as decoder:
        worst = {role: Worst() for role in fresh}
        for _ in random_rounds(subject, decoder, QUICK, seed=1):
            compare_all(decoder, fresh, worst)
    assert worst[FOREIGN].comparisons > 100
    assert all(max(one.logits, one.entries) <= TOLERANCE for one in worst.values()), worst


def test_a_draft_that_reads_a_wrong_context_is_seen(merging: Pair, monkeypatch: pytest.MonkeyPatch):
    """The control of the test above: what was rejected is taken for read."""
    monkeypatch.setattr("trt_spec.runtime.drafters.foreign_draft.Held.agreed", lambda held: len(held.tokens))
    subject = Subject(Bundle.open(merging.bundle), "onnxruntime", "cpu", batch=1)
    with Probes(subject) as fresh, Decoder.open(merging.bundle, max_batch=4) as decoder:
        worst = {role: Worst() for role in fresh}
        for _ in random_rounds(subject, decoder, QUICK, seed=1):
            compare_all(decoder, fresh, worst)
    assert worst[FOREIGN].entries > 0.1


@pytest.mark.parametrize("drafter", WAYS)
def test_a_seed_has_one_text_alone_in_a_batch_and_behind_a_kept_prefix(merging: Pair, drafter: str):
    asked = {"draft_length": 4, "drafter": drafter}
    with Decoder.open(merging.bundle, max_batch=4, prefix_bytes=2**24) as decoder:
        together = decoder.generate(PROMPTS, REJECTION, **asked)
        again = [decoder.generate([prompt], REJECTION, **asked)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in together] == [output.token_ids for output in again]
    assert again[-1].usage.cached_tokens


@pytest.mark.parametrize("drafter", WAYS)
def test_a_long_prompt_is_read_part_by_part_between_rounds(
    decoder: Decoder, drafter: str, monkeypatch: pytest.MonkeyPatch
):
    """Until its draft has read it, a request proposes nothing; one that keeps its draft waits for that."""
    monkeypatch.setattr("trt_spec.runtime.drafters.foreign_draft.BUDGET", 16)
    [plain] = decoder.generate([PROMPTS[4]], GREEDY, draft_length=0)
    [output] = decoder.generate([PROMPTS[4]], GREEDY, draft_length=3, drafter=drafter, trace=True)
    proposed = [bool(one.proposal) for one in output.trace[1:]]
    assert output.token_ids == plain.token_ids
    assert proposed.index(True) >= 2
    [kept] = decoder.generate([PROMPTS[4]], REJECTION, draft_length=3, drafter=drafter, trace=True)
    assert kept.trace[1].proposal


@pytest.mark.parametrize("drafter", WAYS)
def test_after_preemption_a_request_goes_on_with_the_same_text(
    decoder: Decoder, drafter: str, monkeypatch: pytest.MonkeyPatch
):
    expected = decoder.generate(PROMPTS[:4], REJECTION, draft_length=4, drafter=drafter)
    requests = [decoder.submit(prompt, REJECTION, draft_length=4, drafter=drafter) for prompt in PROMPTS[:4]]
    for _ in range(4):
        decoder.step()
    make_room, full = type(decoder.target.cache).make_room, iter([True])

    def once(self, *arguments) -> None:
        if self is decoder.foreign.model.cache and next(full, False):
            raise CacheFull("the cache is full")
        make_room(self, *arguments)

    monkeypatch.setattr(type(decoder.target.cache), "make_room", once)
    decoder.step()
    assert sum(request.state.value == "waiting" for request in requests) == 1
    while decoder.step():
        pass
    assert [request.output().token_ids for request in requests] == [output.token_ids for output in expected]


@pytest.mark.parametrize("drafter", WAYS)
def test_a_request_that_ends_before_its_round_is_asked_for_nothing_in_the_next(
    decoder: Decoder, drafter: str, monkeypatch: pytest.MonkeyPatch
):
    def full(self, *arguments) -> None:
        raise CacheFull("the cache is full")

    alone = decoder.submit(PROMPTS[1], GREEDY, draft_length=4, drafter=drafter)
    with monkeypatch.context() as patched:
        patched.setattr(type(decoder.foreign.model.cache), "make_slots", full)
        decoder.step()
    with pytest.raises(CacheFull):
        alone.output()
    plain, drafted = (decoder.generate([PROMPTS[2]], GREEDY, draft_length=k, drafter=drafter)[0] for k in (0, 4))
    assert drafted.token_ids == plain.token_ids


def test_a_budget_holds_all_that_the_draft_reads(merging: Pair):
    """Its own tokens may be twice as many as the target's; where a text has more, it proposes no longer."""
    bundle = Bundle.open(merging.bundle)
    each = sum(model.contract.cache_bytes_per_token for model in bundle.models.values())
    with Decoder.open(bundle, max_batch=4, cache_bytes=each * 1000) as decoder:
        expected = decoder.generate(PROMPTS, GREEDY, draft_length=0)
        for drafter in WAYS:
            outputs = decoder.generate(PROMPTS, GREEDY, draft_length=4, drafter=drafter)
            assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
            assert all(output.speculation.proposed for output in outputs)


def test_a_text_that_outgrows_the_draft_is_written_without_it(llama: Pair, tmp_path: Path):
    """The draft has 64 positions, the target 256."""
    draft = merging_draft(tmp_path / "draft", max_position_embeddings=64)
    pair = export_pair(llama.checkpoint, tmp_path / "bundle", draft)
    params = replace(GREEDY, max_new_tokens=150)
    with Decoder.open(pair.bundle) as decoder:
        assert decoder.bundle.max_length == 256
        [expected] = decoder.generate([PROMPTS[1]], params, draft_length=0)
        for drafter in WAYS:
            [output] = decoder.generate([PROMPTS[1]], params, draft_length=4, drafter=drafter, trace=True)
            assert output.token_ids == expected.token_ids
            assert output.trace[1].proposal
            assert not output.trace[-1].proposal


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("common", "rejection"),
        ("common", "tokenwise"),
        ("text", "rejection"),
        pytest.param("common", "coupled", marks=pytest.mark.exhaustive),
        pytest.param("text", "tokenwise", marks=pytest.mark.exhaustive),
        pytest.param("text", "coupled", marks=pytest.mark.exhaustive),
    ],
)
def test_it_changes_no_distribution(few: Pair, drafter: str, rule: str):
    """χ² of the two tokens after the first; the draft knows neither of two letters, and says pairs of others."""
    asked = replace(PLAIN, rule=rule, max_new_tokens=4, ignore_eos=True)
    with Decoder.open(few.bundle, max_batch=128) as decoder:

        def sample(seeds: range) -> list[Tokens]:
            requests = [
                decoder.submit(PROMPT, replace(asked, seed=seed), draft_length=2, drafter=drafter) for seed in seeds
            ]
            while decoder.step():
                pass
            return [tuple(request.token_ids[1:3]) for request in requests]

        assert is_distributed_as(exact_distribution(few.exact, PLAIN, 2), sample)
        assert 0 < decoder.speculation.accepted < decoder.speculation.examined


def test_where_a_request_allows_only_what_the_draft_lacks_the_target_still_says_it(few: Pair):
    """Nothing is left of q: what is proposed then is drawn from all that is left, and judged as any other."""
    lacked = (6, 7)
    params = SamplingParams(temperature=1.0, max_new_tokens=12, allowed_token_ids=lacked, seed=1)
    with Decoder.open(few.bundle) as decoder:
        for drafter in WAYS:
            [output] = decoder.generate([PROMPT], params, draft_length=3, drafter=drafter)
            assert set(output.token_ids) == set(lacked)


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_under_a_grammar_texts_are_plain_ones(decoder: Decoder, params: SamplingParams):
    choice = Grammar.choice(["alpha beta", "alpha 20", "gamma"])
    asked = replace(params, grammar=choice, ignore_eos=False)
    [plain] = decoder.generate([PROMPTS[2]], asked, draft_length=0)
    assert plain.text in ("alpha beta", "alpha 20", "gamma")
    for drafter in WAYS:
        [output] = decoder.generate([PROMPTS[2]], asked, draft_length=4, drafter=drafter)
        assert output.token_ids == plain.token_ids
    assert decoder.by_drafter["common"].accepted


def test_a_bundle_without_such_a_draft_refuses_these_drafters_by_name(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        for drafter in WAYS:
            message = f"the bundle has no draft with tokens of its own, which drafter {drafter} runs"
            with pytest.raises(RequestError, match=message):
                decoder.submit([5], drafter=drafter)


def test_trees_and_beams_are_refused_and_combs_are_not(decoder: Decoder):
    for drafter in WAYS:
        with pytest.raises(RequestError, match=f"num_beams needs drafter model or none, not {drafter}"):
            decoder.submit([5], SamplingParams(num_beams=2), drafter=drafter)
    [searched] = decoder.generate([PROMPTS[2]], SamplingParams(num_beams=2, max_new_tokens=8))
    assert searched.text, "by the target alone"
    with pytest.raises(RequestError, match="drafter common can grow no tree here"):
        decoder.submit([5], drafter="common", draft_length="2/6")
    with pytest.raises(RequestError, match="drafter text can put nothing beside its proposals"):
        decoder.submit([5], drafter="text", draft_length="2+2")
    [plain] = decoder.generate([PROMPTS[2]], COUPLED, draft_length=0)
    [comb] = decoder.generate([PROMPTS[2]], COUPLED, drafter="common", draft_length="3+3")
    assert comb.token_ids == plain.token_ids


def test_the_usual_drafter_is_the_one_that_export_found_better(decoder: Decoder):
    request = decoder.submit(PROMPTS[1], GREEDY)
    assert request.drafter == decoder.bundle.models[FOREIGN].tokens.drafter
    decoder.cancel(request)
