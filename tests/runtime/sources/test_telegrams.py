"""The shipped T5 writes out telegrams as it does in transformers, and its draft agrees often, not always."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.full import CacheFull
from trt_spec.runtime.state.rows import Rows

from ...kit.bundles import Pair

PAGE = Path(__file__).parents[3] / "tools/demo_pair/README.md"
TELEGRAMS = (  # written here, of words that docstrings have
    "return name file",
    "if path given return list all files folder",
    "create new instance class from string",
    "number bytes read from stream",
    "raise error if value not integer",
    "this method called when connection closed",
    "check whether object has attribute",
    "convert list strings to dictionary",
    "read next line from file and return it",
    "default value used if key not found",
)
NAMES = (  # words of several tokens, which are copied
    "raise notimplementederror unless subclass overrides serialize",
    "error raised if surrogateescape cannot decode bytes",
    "scheduler closes eventloop when threadpool finishes",
    "return bool indicating whether object was opened writing",
    "raise generatorexit inside generator",
    "change stream position byte offset",
)
GREEDY = SamplingParams(max_new_tokens=48, temperature=0)


@pytest.fixture(scope="module")
def decoder(telegrams: Pair):
    with Decoder.open(telegrams.bundle, max_batch=4) as decoder:
        yield decoder


def test_a_telegram_is_written_out_as_in_transformers_with_any_draft(telegrams: Pair, decoder: Decoder) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(telegrams.checkpoint, dtype=torch.float32).eval()
    sources = [decoder.tokenizer.encode(one).ids for one in TELEGRAMS]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False, num_beams=1)[0, 1:].tolist()
        for ids in sources
    ]
    for drafter, length in (("none", 0), ("model", 7), ("model+suffix", 4), ("cascade", 4)):
        outputs = decoder.generate(sources=TELEGRAMS, params=GREEDY, drafter=drafter, draft_length=length)
        assert [[*one.token_ids] for one in outputs] == expected, drafter
    assert all(one.text[0].isupper() and one.text.endswith(".") for one in outputs)
    copied = sum(
        set(telegram.split()) <= set(one.text.lower().rstrip(".").split())
        for telegram, one in zip(TELEGRAMS, outputs, strict=True)
    )
    assert copied > len(TELEGRAMS) / 2, "most telegrams are in their sentences word for word"


def test_it_writes_what_its_page_shows(decoder: Decoder) -> None:
    [output] = decoder.generate(sources=["return names files folder"], params=GREEDY)
    assert output.text == "Return the names of the files in the folder."
    assert output.text in " ".join(PAGE.read_text().split())


def test_both_take_less_than_eight_megabytes(telegrams: Pair) -> None:
    draft = telegrams.checkpoint.with_name("telegram-400k")
    assert sum(file.stat().st_size for one in (telegrams.checkpoint, draft) for file in one.iterdir()) < 8e6


@pytest.mark.parametrize("temperature", [0, 1])
def test_lookup_copies_from_telegrams_whatever_becomes_of_their_rows(
    decoder: Decoder, temperature: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join, leave and close up, as there are more telegrams than rows; some give up their place."""
    params = [replace(GREEDY, temperature=temperature, seed=seed, rule="coupled") for seed, _ in enumerate(NAMES)]
    plain = decoder.generate(sources=NAMES, params=params, draft_length=0)
    asked = {"drafter": "lookup", "draft_length": 5}
    requests = [decoder.submit(source=one, params=own, **asked) for one, own in zip(NAMES, params, strict=True)]
    preempted = 0
    for turn in range(10_000):
        if not decoder.step():
            break
        if turn % 3 == 2 and len(decoder.live) > 1:
            with decoder.between_rounds():
                decoder._scheduler.seating.preempt(CacheFull("somebody else needs the memory"))
            preempted += 1
    assert preempted > 2
    copied = [request.output() for request in requests]
    monkeypatch.setattr(Rows, "note_source", lambda *_: None)
    with Decoder.open(decoder.bundle, max_batch=4) as other:
        without = other.generate(sources=NAMES, params=params, **asked)
    for some in (copied, without):
        assert [one.token_ids for one in some] == [one.token_ids for one in plain]
    tokens_a_round = [
        sum(one.speculation.accepted + one.speculation.rounds for one in some)
        / sum(one.speculation.rounds for one in some)
        for some in (copied, without)
    ]
    assert tokens_a_round[0] > 1.25 * tokens_a_round[1], tokens_a_round


def test_its_draft_agrees_often_and_not_always_greedily_and_sampled(decoder: Decoder) -> None:
    for temperature in (0.0, 1.0):
        params = [replace(GREEDY, temperature=temperature, seed=seed) for seed, _ in enumerate(TELEGRAMS)]
        outputs = decoder.generate(sources=TELEGRAMS, params=params, draft_length=5)
        spoken = [one.speculation for one in outputs]
        assert 0.7 < sum(one.accepted for one in spoken) / sum(one.examined for one in spoken) < 1
