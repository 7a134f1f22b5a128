"""A bundle may hold several drafts, each a drafter of its own: no text depends on which of them proposes."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from trt_spec.engines import BLOCK_TOKENS, PREFILL_WIDTH, Bundle, BundleError, RequestError
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.scheduling.prefill import DRAFT_BUDGET
from trt_spec.tools.certificate.probe import Probe
from trt_spec.tools.certificate.subject import Subject

from ..kit.bundles import Pair, noisy_draft, pair_of
from ..kit.caches import read_by, require_all_fresh
from ..kit.costs import LENGTHS, table
from ..kit.exact import PLAIN, PROMPT, exact_distribution
from ..kit.prompts import random_prompts
from ..kit.recorded import transformers_greedy
from ..kit.sampled import Tokens, is_distributed_as
from ..kit.scripts import counted, counting
from .scripted import scripted_decoder

GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
COUPLED = replace(GREEDY, temperature=0.9, rule="coupled", seed=5)
REJECTION = replace(GREEDY, temperature=0.9, seed=5)
BOTH = ("model", "model2")


@pytest.fixture(scope="module")
def fresh(drafts: Pair) -> dict[str, Probe]:
    subject = Subject(Bundle.open(drafts.bundle), "onnxruntime", "cpu", batch=1)
    return {name: Probe(subject, name) for name in subject.bundle.names}


@pytest.fixture(scope="module")
def eight_drafts(eight: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("eight_drafts")
    return pair_of(eight, noisy_draft(eight.bundle, folder, 0.8, seed=3, name="draft2"))


def mute(context) -> int:
    """A draft that is never right: it says what no counting model says next."""
    return context[-1]


def test_drafters_are_named_after_the_drafts_of_the_bundle(drafts: Pair, llama: Pair):
    with Decoder.open(drafts.bundle) as decoder:
        assert [name for name in decoder.drafters if name.startswith("model")] == ["model", "model2"]
        assert decoder.draft is decoder.drafts[0]
        assert len(decoder.drafts) == 2
    with Decoder.open(llama.bundle) as decoder:
        assert [name for name in decoder.drafters if name.startswith("model")] == ["model"]


def test_a_draft_that_the_bundle_lacks_is_refused_by_name(drafts: Pair, llama: Pair, tmp_path: Path):
    for bundle, drafter, name in ((llama.bundle, "model2", "draft2"), (drafts.bundle, "model4", "draft4")):
        message = rf"the bundle has no {name}, which drafter {drafter} runs; use drafter model, or export with more"
        with Decoder.open(bundle) as decoder, pytest.raises(RequestError, match=message):
            decoder.submit([1], drafter=drafter)
    message = r"^the bundle has no draft model; use drafter lookup or none$"
    with scripted_decoder(tmp_path, counting) as decoder, pytest.raises(RequestError, match=message):
        decoder.submit([1], drafter="model2")


def test_refusals_name_the_drafters_of_further_drafts_only_if_the_bundle_has_them(drafts: Pair, llama: Pair):
    for bundle, named in ((drafts.bundle, True), (llama.bundle, False)):
        with Decoder.open(bundle) as decoder:
            for settings in ({"drafter": "magic"}, {"drafter": "lookup", "draft_length": "3+1"}):
                with pytest.raises(RequestError) as caught:
                    decoder.submit([1], **settings)
                assert ("model2" in str(caught.value)) == named
                assert "model3" not in str(caught.value)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "torch"])
def test_greedy_output_equals_transformers_whichever_draft_proposes(drafts: Pair, engine: str):
    prompts = random_prompts(64, [1, 4, 19, 40], seed=3)
    expected = transformers_greedy(drafts.reference, prompts, 40)
    params = SamplingParams(max_new_tokens=40)
    acceptance = {}
    with Decoder.open(drafts.bundle, engine, max_batch=4) as decoder:
        for drafter, k in (("model2", 1), ("model2", 4), ("model2", 9), ("model", 4)):
            outputs = decoder.generate(prompts, params, draft_length=k, drafter=drafter)
            assert [list(output.token_ids) for output in outputs] == expected, f"{drafter}, K {k}"
            acceptance[drafter] = [output.speculation.acceptance for output in outputs]
    assert all(own != other for own, other in zip(acceptance["model"], acceptance["model2"], strict=True))


@pytest.mark.parametrize("params", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])
def test_rows_of_one_batch_use_different_drafts(drafts: Pair, fresh, params: SamplingParams):
    """Their caches are those of a fresh prefill, their outputs what each row says alone, whatever the rule."""
    prompts = random_prompts(64, [5, 9, 12, 30], seed=6)
    each = [replace(params, seed=seed) for seed in range(4)]
    names = ["model", "model2", "model2", "model"]
    with Decoder.open(drafts.bundle, max_batch=1) as decoder:
        alone = [
            decoder.generate([prompt], own, draft_length=4, drafter=drafter)[0]
            for prompt, own, drafter in zip(prompts, each, names, strict=True)
        ]
        plain = decoder.generate(prompts, each, draft_length=0)
    with Decoder.open(drafts.bundle, max_batch=4) as decoder:
        requests = [
            decoder.submit(prompt, own, draft_length=4, drafter=drafter)
            for prompt, own, drafter in zip(prompts, each, names, strict=True)
        ]
        while decoder.step():
            require_all_fresh(decoder, requests, fresh)
        outputs = [request.output() for request in requests]
    assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
    assert [one.speculation.outcomes for one in outputs] == [one.speculation.outcomes for one in alone]
    assert all(one.speculation.accepted for one in outputs)
    if params is not REJECTION:  # whose text depends on the draft
        assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]


def test_each_row_is_judged_by_its_own_draft(tmp_path: Path):
    """One draft is always right, the other never, in the same rounds: no row sees the logits of the other's."""
    with scripted_decoder(tmp_path, counting, counting, draft2=mute, max_batch=4) as decoder:
        for first, second in (BOTH, reversed(BOTH)):
            outputs = [
                decoder.submit([7, 20 * row], replace(GREEDY, max_new_tokens=26), draft_length=4, drafter=drafter)
                for row, drafter in enumerate((first, second, second, first))
            ]
            while decoder.step():
                pass
            for row, request in enumerate(outputs):
                assert request.token_ids == counted(20 * row, 26)
                assert request.speculation.acceptance == (1.0 if request.drafter == "model" else 0.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rule", "names"),
    [("rejection", BOTH), ("rejection", ("model2",)), ("tokenwise", BOTH), ("coupled", BOTH)],
)
def test_the_second_draft_changes_no_distribution(eight_drafts: Pair, rule: str, names: tuple[str, ...]):
    """χ² of the two tokens after the first, of rows that use the second draft, alone or beside others that do not."""
    asked = replace(PLAIN, rule=rule, max_new_tokens=4, ignore_eos=True)
    with Decoder.open(eight_drafts.bundle, max_batch=128) as decoder:

        def sample(seeds: range) -> list[Tokens]:
            requests = [
                decoder.submit(PROMPT, replace(asked, seed=seed), draft_length=2, drafter=names[seed % len(names)])
                for seed in seeds
            ]
            while decoder.step():
                pass
            return [tuple(request.token_ids[1:3]) for request in requests]

        assert is_distributed_as(exact_distribution(eight_drafts.exact, PLAIN, 2), sample)
        assert 0 < decoder.speculation.accepted < decoder.speculation.examined


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_caches_of_all_drafts_equal_a_fresh_prefill_after_random_rounds(drafts: Pair, fresh, engine: str):
    """Requests turn from draft to draft in mid-stream, to other drafters and back, are cancelled, and move."""
    choose = random.Random(3)
    lengths = [choose.choice([1, 2, 3, 10, 50, 70]) for _ in range(12)]
    prompts = random_prompts(64, lengths, seed=4)
    each = [replace(COUPLED, seed=seed, max_new_tokens=50) for seed in range(12)]
    with Decoder.open(drafts.bundle, max_batch=1) as decoder:
        expected = [output.token_ids for output in decoder.generate(prompts, each, draft_length=0)]
    with Decoder.open(drafts.bundle, engine, max_batch=4) as decoder:
        requests = [
            decoder.submit(prompt, one, drafter=choose.choice(BOTH)) for prompt, one in zip(prompts, each, strict=True)
        ]
        while decoder.step():
            require_all_fresh(decoder, requests, fresh)
            for request in requests:
                if choose.random() < 0.4:
                    others = ["none", "cascade", "random"]
                    request.draft(choose.choice([0, 1, 2, 5, 9]), choose.choice([*BOTH, *BOTH, *others]))
                if choose.random() < 0.01:
                    decoder.cancel(request)
        assert 0 < decoder.speculation.accepted < decoder.speculation.examined
    cancelled = [request.finish_reason == "cancelled" for request in requests]
    assert any(cancelled)
    for request, tokens in zip(requests, expected, strict=True):
        assert tuple(request.token_ids) == tokens[: len(request.token_ids)]
        assert len(request.token_ids) == len(tokens) or request.finish_reason == "cancelled"


def test_a_draft_that_no_row_wants_is_neither_fed_nor_run(tmp_path: Path):
    with scripted_decoder(tmp_path, counting, counting, draft2=counting) as decoder:
        first, second = (draft.engine.widths for draft in decoder.drafts)
        request = decoder.submit([1] * 50, GREEDY, draft_length=3, drafter="model")
        for _ in range(3):
            decoder.step()
        assert first
        assert not second
        request.draft(3, "model2")
        first.clear()
        while decoder.step():
            pass
        assert second[0][1] >= 50, "it owed the whole context"
        assert not first
        assert request.token_ids == counted(1, 40)


def test_a_long_catch_up_of_two_drafts_does_not_starve_live_rows(tmp_path: Path):

    def sure(context) -> int:
        """Right if the draft has read the prompt, for which a cache that was never written cannot stand in."""
        return counting(context) if context[:3000:500] == 6 * [5] else mute(context)

    with scripted_decoder(tmp_path, counting, sure, draft2=sure, max_length=8192) as decoder:
        long = replace(GREEDY, max_new_tokens=1000)
        late = [decoder.submit([5] * 3000, long, drafter="none") for _ in BOTH]
        while not all(request.token_ids for request in late):
            decoder.step()
        for request, drafter in zip(late, BOTH, strict=True):
            request.draft(4, drafter)
        for _ in range(20):
            before = [len(request.token_ids) for request in late]
            for draft in decoder.drafts:
                draft.engine.widths.clear()
            decoder.step()
            fed = sum(batch * width for draft in decoder.drafts for batch, width in draft.engine.widths)
            assert fed <= DRAFT_BUDGET + PREFILL_WIDTH + 2 * 2 * 17
            assert all(len(request.token_ids) > count for request, count in zip(late, before, strict=True))
        assert all(request.speculation.acceptance == 1.0 for request in late), "both have caught up"
        for request in late:
            decoder.cancel(request)
        decoder.step()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_the_budget_of_bytes_counts_the_caches_of_all_drafts(drafts: Pair, engine: str):
    """Two requests fit at a time, by what they may need of three caches."""
    params = replace(GREEDY, max_new_tokens=60)
    prompts = [[5 + i, 9, 17] for i in range(6)]
    with Decoder.open(drafts.bundle, engine) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, params, draft_length=0)]
        models = [decoder.target, *decoder.drafts]
        per_token = sum(model.engine.contract.cache_bytes_per_token for model in models)
    tokens = 2 * 128  # 63 tokens and 17 ahead take 96 in blocks, and 128 in rows
    with Decoder.open(drafts.bundle, engine, cache_bytes=tokens * per_token) as decoder:
        requests = [decoder.submit(prompt, params, drafter=BOTH[i % 2]) for i, prompt in enumerate(prompts)]
        most, memory = 0, 0
        while decoder.step():
            most = max(most, len(decoder.live))
            buffers = [b for model in (decoder.target, *decoder.drafts) for b in model.cache.buffers.values()]
            memory = max(memory, sum(buffer.nbytes for buffer in buffers))
        assert [request.output().token_ids for request in requests] == expected
    assert most == 2
    assert memory <= (tokens + BLOCK_TOKENS) * per_token, "the spare block comes on top"
    with (
        Decoder.open(drafts.bundle, engine, cache_bytes=tokens * per_token - 1) as decoder,
        pytest.raises(RequestError, match="need more cache than"),
    ):
        decoder.submit([5, 9, 17], replace(params, max_new_tokens=tokens - 20))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_what_each_draft_has_read_is_kept_for_later_requests(
    drafts: Pair, engine: str, monkeypatch: pytest.MonkeyPatch
):
    [prompt] = random_prompts(64, [100], seed=2)
    read, outputs = read_by(monkeypatch), []
    with Decoder.open(drafts.bundle, engine, prefix_bytes=2**24) as decoder:
        for drafter, draft in zip(2 * BOTH, 2 * decoder.drafts, strict=True):
            read.clear()
            outputs += decoder.generate([prompt], GREEDY, drafter=drafter, draft_length=3)
            kept = 0 if len(outputs) <= 2 else outputs[-1].usage.cached_tokens
            assert read[id(draft)] == 99 - kept
        assert [one.usage.cached_tokens for one in outputs] == [0, 64, 64, 64], "the first has read it for all others"
        assert len({one.token_ids for one in outputs}) == 1


def test_a_length_chosen_by_costs_works_for_the_second_draft(drafts: Pair, tmp_path: Path):
    costs = table(model2=[[1.0 + 0.2 * k for k in LENGTHS]] * 2)
    with scripted_decoder(tmp_path, counting, mute, draft2=counting, costs=costs) as decoder:
        request = decoder.submit([1], replace(GREEDY, max_new_tokens=200), drafter="model2", draft_length="auto")
        while decoder.step():
            pass
        assert request.token_ids == counted(1, 200)
        assert request.speculation.acceptance == 1.0


def test_a_comb_of_the_second_draft_stands_beside_a_line_of_the_first(drafts: Pair):
    prompts = random_prompts(64, [5, 9, 12, 30], seed=6)
    each = [replace(COUPLED, seed=seed) for seed in range(4)]
    with Decoder.open(drafts.bundle, max_batch=4) as decoder:
        expected = decoder.generate(prompts, each, draft_length=0)
        requests = [
            decoder.submit(prompt, one, draft_length=k, drafter=drafter)
            for prompt, one, (drafter, k) in zip(prompts, each, 2 * [("model2", "3+3"), ("model", 5)], strict=True)
        ]
        while decoder.step():
            pass
    assert [request.output().token_ids for request in requests] == [one.token_ids for one in expected]


def test_a_bundle_of_more_drafts_than_have_names_is_refused(drafts: Pair, tmp_path: Path):
    path = drafts.bundle
    for number in (3, 4, 5):
        path = noisy_draft(path, tmp_path / str(number), 0.1, name=f"draft{number}")
        if number == 4:
            with Decoder.open(path) as decoder:
                assert len(decoder.drafts) == 4
                [output] = decoder.generate([[5, 6, 7]], GREEDY, drafter="model4")
                [plain] = decoder.generate([[5, 6, 7]], GREEDY, draft_length=0)
                assert output.token_ids == plain.token_ids
    with pytest.raises(BundleError, match="lists 5 drafts, expected at most 4"):
        Bundle.open(path)
