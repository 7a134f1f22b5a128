"""The shipped T5 writes out telegrams as it does in transformers, and its draft agrees often, not always."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM
from trt_spec.runtime import Decoder, SamplingParams

from ...bundles import Pair

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
    for drafter, length in (("none", 0), ("model", 3), ("model", 7), ("suffix", 4), ("model+suffix", 4)):
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


def test_its_draft_agrees_often_and_not_always_greedily_and_sampled(decoder: Decoder) -> None:
    for temperature in (0.0, 1.0):
        params = [replace(GREEDY, temperature=temperature, seed=seed) for seed, _ in enumerate(TELEGRAMS)]
        outputs = decoder.generate(sources=TELEGRAMS, params=params, draft_length=5)
        spoken = [one.speculation for one in outputs]
        assert 0.7 < sum(one.accepted for one in spoken) / sum(one.examined for one in spoken) < 1
