"""Rows of one batch may have adapters, each its own: texts are those of transformers with PEFT, whatever is drafted."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import copytree, rmtree
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file
from trt_spec.engines import Bundle, BundleError, RequestError
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, Request, SamplingParams
from trt_spec.runtime.memory.adapter_pool import AdapterPool

from ...kit.adapters import ROOM, Adapted
from ...kit.replaying import replaying

PROMPT = [5, 9, 17, 5, 9, 20, 33]
ROWS = (None, "wide", "narrow", "wide", None)  # their adapters
TOKENS = 24
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
COUPLED = SamplingParams(max_new_tokens=TOKENS, temperature=1, rule="coupled", seed=7, ignore_eos=True)
CHOICES = [(0, "none"), (3, "model"), ("3x2", "model"), ("4+2", "model"), (4, "suffix"), ("2/5", "model")]


@pytest.fixture(scope="module")
def expected(adapted: Adapted) -> dict[str | None, tuple[int, ...]]:
    found = {name: adapted.said(name, PROMPT, TOKENS) for name in set(ROWS)}
    assert len(set(found.values())) == 3
    return found


def opened(adapted: Adapted, **options: object) -> Decoder:
    decoder = Decoder.open(adapted.pair.bundle, **options)
    for name, folder in adapted.folders.items():
        decoder.load_adapter(name, folder)
    return decoder


@pytest.fixture(scope="module")
def decoder(adapted: Adapted) -> Iterator[Decoder]:
    with opened(adapted, prefix_bytes=2**22) as decoder:
        yield decoder


def run(decoder: Decoder, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    while decoder.step():
        pass
    return [one.output().token_ids for one in requests]


@pytest.mark.parametrize(("length", "drafter"), CHOICES)
def test_each_row_of_a_batch_has_its_own(decoder: Decoder, expected: dict, length: object, drafter: str) -> None:
    rows = [decoder.submit(PROMPT, GREEDY, draft_length=length, drafter=drafter, adapter=one) for one in ROWS]
    assert run(decoder, rows) == [expected[one] for one in ROWS]


@pytest.mark.parametrize("engine", ["torch", "openvino", pytest.param("torch-compiled", marks=pytest.mark.exhaustive)])
def test_other_engines_say_the_same(adapted: Adapted, expected: dict, engine: str) -> None:
    with opened(adapted, engine=engine) as decoder:
        rows = [decoder.submit(PROMPT, GREEDY, draft_length=3, adapter=one) for one in ROWS]
        assert run(decoder, rows) == [expected[one] for one in ROWS]


def test_openvino_reads_long_prompts_with_them(adapted: Adapted) -> None:
    """The tokens of which are no sequences of their own, in a call that is kept by nobody."""
    prompt, short = PROMPT * 5, SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    with opened(adapted, engine="openvino", max_batch=3) as decoder:
        rows = [decoder.submit(prompt, short, draft_length=2, adapter=one) for one in ROWS[:3]]
        assert run(decoder, rows) == [adapted.said(one, prompt, 6) for one in ROWS[:3]]


def test_rounds_that_are_replayed_do_too(adapted: Adapted, expected: dict) -> None:
    """As on a GPU; texts end at unlike lengths, and others take their rows."""
    with replaying() as machine, opened(adapted, engine="torch", max_batch=3) as decoder:
        some = [decoder.submit(PROMPT, GREEDY, draft_length=3, adapter=one) for one in ROWS]
        short = SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True)
        more = [decoder.submit(PROMPT, short, draft_length=3, adapter=one) for one in ("narrow", None, "wide")]
        found = run(decoder, [*some, *more])
    assert found[: len(ROWS)] == [expected[one] for one in ROWS]
    assert found[len(ROWS) :] == [expected[one][:5] for one in ("narrow", None, "wide")]
    assert sum(machine.launched) > 10


def test_a_seeded_text_is_that_of_the_merged_model(adapted: Adapted, decoder: Decoder, tmp_path: Path) -> None:
    found = run(decoder, [decoder.submit(PROMPT, COUPLED, draft_length=3, adapter=one) for one in ROWS])
    for name in adapted.folders:
        bundle = tmp_path / name
        export_bundle(adapted.pair.checkpoint, bundle, lora=adapted.folders[name], check=False)
        with Decoder.open(bundle) as merged:
            [output] = merged.generate([PROMPT], COUPLED, draft_length=0)
        assert all(text == output.token_ids for text, one in zip(found, ROWS, strict=True) if one == name)


def test_a_request_that_gave_up_its_place_goes_on_with_its_adapter(adapted: Adapted, expected: dict) -> None:
    with opened(adapted) as decoder:
        seating = decoder._scheduler.seating
        rows = [decoder.submit(PROMPT, GREEDY, draft_length=3, adapter=one) for one in ROWS]
        for _ in range(3):
            decoder.step()
        from trt_spec.runtime.memory.full import CacheFull

        seating.preempt(CacheFull("the cache is full"))
        seating.preempt(CacheFull("the cache is full"))
        assert len(seating.waiting) == 2
        assert run(decoder, rows) == [expected[one] for one in ROWS]


def test_what_one_adapter_has_computed_is_not_found_by_another(adapted: Adapted) -> None:
    prompt = [*PROMPT * 20]
    short = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True)
    with opened(adapted, prefix_bytes=2**22) as decoder:
        cached = []
        for one in ("wide", "narrow", None, "wide", None, "narrow"):
            [output] = decoder.generate([prompt], short, adapter=one)
            cached.append(output.usage.cached_tokens > 0)
        assert cached == [False, False, False, True, True, True]
        decoder.unload_adapter("wide")
        decoder.load_adapter("wide", adapted.folders["narrow"])  # the same weights by another name
        [output] = decoder.generate([prompt], short, adapter="wide")
        assert output.usage.cached_tokens > 0


def test_an_adapter_in_use_stays_until_its_requests_end(adapted: Adapted, expected: dict) -> None:
    with opened(adapted) as decoder:
        request = decoder.submit(PROMPT, GREEDY, draft_length=3, adapter="wide")
        decoder.step()
        decoder.unload_adapter("wide")
        with pytest.raises(RequestError, match="there is no adapter 'wide'; loaded are: narrow"):
            decoder.submit(PROMPT, GREEDY, adapter="wide")
        decoder.load_adapter("second", adapted.folders["narrow"])
        with pytest.raises(RequestError, match=r"the room for 3 adapters is taken \(1 unloaded but still in use\)"):
            decoder.load_adapter("third", adapted.folders["narrow"])
        assert run(decoder, [request]) == [expected["wide"]]
        decoder.load_adapter("third", adapted.folders["narrow"])
        rows = [decoder.submit(PROMPT, GREEDY, adapter=one) for one in ("third", None)]
        assert run(decoder, rows) == [expected["narrow"], expected[None]]
        assert list(decoder.adapters) == ["narrow", "second", "third"]


def test_one_that_is_held_stays_for_requests_that_come_later(adapted: Adapted, expected: dict) -> None:
    with opened(adapted) as decoder:
        with decoder.holding_adapter("wide") as held:
            decoder.unload_adapter("wide")
            decoder.load_adapter("wide", adapted.folders["narrow"])
            rows = [decoder.submit(PROMPT, GREEDY, draft_length=3, adapter=one) for one in (held, "wide")]
            assert run(decoder, rows) == [expected["wide"], expected["narrow"]]
            with pytest.raises(RequestError, match=r"the room for 3 adapters is taken \(1 unloaded but still in use\)"):
                decoder.load_adapter("third", adapted.folders["narrow"])
        with pytest.raises(RequestError, match="was loaded anew"):
            decoder.submit(PROMPT, GREEDY, adapter=held)
        decoder.load_adapter("third", adapted.folders["narrow"])


def test_a_place_that_is_free_again_keeps_nothing_of_what_was_there(adapted: Adapted, expected: dict) -> None:
    """`wide` has columns where `narrow` has none."""
    with Decoder.open(adapted.pair.bundle) as decoder:
        for name in ("wide", "narrow"):
            decoder.load_adapter("one", adapted.folders[name])
            assert run(decoder, [decoder.submit(PROMPT, GREEDY, adapter="one")]) == [expected[name]]
            decoder.unload_adapter("one")


def test_acceptance_is_told_for_each(adapted: Adapted) -> None:
    with opened(adapted) as decoder:
        run(decoder, [decoder.submit(PROMPT, GREEDY, draft_length=3, drafter="model", adapter=one) for one in ROWS])
        by_adapter = decoder.by_adapter
        assert set(by_adapter) == {"wide", "narrow"}
        assert sum(one.proposed for one in by_adapter.values()) < decoder.speculation.proposed
        assert decoder.held_bytes["adapters"] > 0
        decoder.unload_adapter("wide")
        decoder.load_adapter("wide", adapted.folders["wide"])
        assert set(decoder.by_adapter) == {"narrow"}


def test_rows_whose_adapters_are_taken_for_one_another_show(adapted: Adapted, expected: dict) -> None:
    """The control: a row that joins has the adapter of the one before it."""
    seat = AdapterPool.seat

    def one_before(pool: AdapterPool, row: int, adapter: object) -> None:
        seat(pool, row, adapter)
        if row:
            pool.swap(row, row - 1)

    with patch.object(AdapterPool, "seat", one_before), opened(adapted) as decoder:
        rows = [decoder.submit(PROMPT, GREEDY, draft_length=3, adapter=one) for one in ROWS]
        assert run(decoder, rows) != [expected[one] for one in ROWS]


def test_a_row_that_moves_without_its_adapter_shows(adapted: Adapted, expected: dict) -> None:
    """The control."""
    with patch.object(AdapterPool, "move", lambda pool, source, destination: None), opened(adapted) as decoder:
        short = SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
        first = decoder.submit(PROMPT, short, draft_length=3)
        rows = [decoder.submit(PROMPT, GREEDY, draft_length=3, adapter=one) for one in ROWS]
        assert run(decoder, [first, *rows])[1:] != [expected[one] for one in ROWS]


def test_a_request_does_not_get_what_was_loaded_in_its_adapters_place(adapted: Adapted) -> None:
    """Both happen in another thread, once it has been named."""
    with opened(adapted) as decoder:
        join = AdapterPool.join

        def too_late(pool: AdapterPool, request: Request, adapter: object) -> None:
            decoder.unload_adapter("wide")
            decoder.load_adapter("wide", adapted.folders["narrow"])
            join(pool, request, adapter)

        with patch.object(AdapterPool, "join", too_late), pytest.raises(RequestError, match="was loaded anew"):
            decoder.submit(PROMPT, GREEDY, adapter="wide")
        assert run(decoder, [decoder.submit(PROMPT, GREEDY, adapter="wide")])


def test_numbers_of_one_adapter_that_overflow_reach_no_other_row(adapted: Adapted, expected: dict, tmp_path) -> None:
    folder = copytree(adapted.folders["narrow"], tmp_path / "large")
    file = folder / "adapter_model.safetensors"
    save_file({name: one * (1e37 if "lora_A" in name else 1e-37) for name, one in load_file(file).items()}, file)
    with opened(adapted) as decoder:
        decoder.load_adapter("large", folder)
        rows = [decoder.submit(PROMPT, GREEDY, draft_length=3, adapter=one) for one in ("large", None, "wide")]
        while decoder.step():
            pass
        assert [one.output().token_ids for one in rows[1:]] == [expected[None], expected["wide"]]


def test_nothing_is_loaded_into_a_decoder_that_is_closed(adapted: Adapted) -> None:
    decoder = opened(adapted)
    decoder.close()
    with pytest.raises(RequestError, match="the decoder is closed"):
        decoder.load_adapter("late", adapted.folders["narrow"])
    assert decoder._models.adapters.held_bytes == 0


def test_without_room_adapters_are_refused_by_name(llama, adapted: Adapted) -> None:
    folder = adapted.folders["wide"]
    with Decoder.open(llama.bundle) as decoder:
        assert decoder.adapters == {}
        with pytest.raises(RequestError, match=r"bundle .* has no room for adapters; export it with --adapters"):
            decoder.load_adapter("wide", folder)
    with Decoder.open(adapted.pair.bundle, engine="openvino-bfloat16") as decoder:
        with pytest.raises(RequestError, match="engine openvino-bfloat16 runs no adapters; use engine onnxruntime or"):
            decoder.load_adapter("wide", folder)
        run(decoder, [decoder.submit(PROMPT, GREEDY)])


def test_of_a_bundle_that_was_replaced_nothing_more_is_read(adapted: Adapted, llama, tmp_path: Path) -> None:
    """Else the rows that have adapters would be another model's."""
    place = copytree(adapted.pair.bundle, tmp_path / "bundle")
    bundle = Bundle.open(place)
    with Decoder.open(bundle) as early, Decoder.open(bundle) as late:
        early.load_adapter("wide", adapted.folders["wide"])
        rmtree(place)
        copytree(llama.bundle, place)
        early.load_adapter("narrow", adapted.folders["narrow"])
        for _ in range(2):
            with pytest.raises(BundleError, match=r"bundle .* was replaced after it was read; open it again$"):
                late.load_adapter("wide", adapted.folders["wide"])
        plain = [run(one, [one.submit(PROMPT, GREEDY)]) for one in (early, late)]
        assert plain[0] == plain[1]
    with pytest.raises(BundleError, match="was replaced after it was read"):
        Decoder.open(bundle)


def test_what_nobody_loads_costs_no_memory(adapted: Adapted) -> None:
    with Decoder.open(adapted.pair.bundle) as decoder:
        run(decoder, [decoder.submit(PROMPT, GREEDY)])
        assert decoder.held_bytes["adapters"] == 0
        assert decoder.target.engine._adapted is None
        assert ROOM["adapters"] == decoder.bundle.target.contract.adapters.most
