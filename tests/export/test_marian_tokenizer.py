"""Marian's two models of sentencepiece become one tokenizer, with the ids and texts of MarianTokenizer."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from transformers import AutoModelForSeq2SeqLM, MarianTokenizer
from trt_spec.engines import ExportError
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
from trt_spec.export.checkpoints.vocabulary import read_vocabulary
from trt_spec.export.pipeline import SAMPLE
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.bundles import export_pair
from ..kit.source_models import tiny_with_source

LINES = SAMPLE.read_text().splitlines()
FOREIGN = [line.replace("s", "ß").replace("a", "ä").replace("the", "日本 語") for line in LINES]
LETTERS = "abc de,.ßäö日本語😀é  \t\nÀﬁ①ｗ▁<>/\ue000"


def train(folder: Path, name: str, lines: list[str], **settings: Any) -> None:
    (folder / "lines").write_text("\n".join(lines))
    settings = {"vocab_size": 300, "character_coverage": 1.0, "minloglevel": 2} | settings
    sentencepiece.SentencePieceTrainer.train(input=str(folder / "lines"), model_prefix=str(folder / name), **settings)
    (folder / f"{name}.model").rename(folder / f"{name}.spm")


def pieces_of(file: Path) -> list[str]:
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return [model.id_to_piece(i) for i in range(len(model)) if not model.is_control(i) and not model.is_unknown(i)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Marian whose two sides share most pieces; some of the target's begin or end like the source's."""
    folder = tmp_path_factory.mktemp("marian")
    train(folder, "source", LINES)
    train(folder, "target", FOREIGN)
    both = [*pieces_of(folder / "source.spm"), *pieces_of(folder / "target.spm")]
    pieces = dict.fromkeys(["<unk>", "</s>", "<pad>", *both, ">>fra<<"])
    path = tiny_with_source("marian", folder / "checkpoint", vocab_size=len(pieces))
    (path / "tokenizer.json").unlink()
    for name in ("source.spm", "target.spm"):
        shutil.copy(folder / name, path)
    (path / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    return path


def test_ids_and_texts_are_those_of_marian_tokenizer(checkpoint: Path) -> None:
    theirs, found = MarianTokenizer.from_pretrained(checkpoint), read_vocabulary(open_checkpoint(checkpoint))
    choose = random.Random(0)
    drawn = ["".join(choose.choices(LETTERS, k=choose.randint(0, 30))) for _ in range(1000)]
    known = ["", " ", "Straße", "日本", "日本人", "ßß ß", "a</s>b", "x <unk> y", ">>fra<< the first", "\u3000a\u200bb"]
    texts = [*LINES, *FOREIGN, *drawn, *known]
    unknown = 0
    for text in texts:
        ids = theirs(text).input_ids
        assert found.tokenizer.encode(text).ids == ids, text
        unknown += ids.count(theirs.unk_token_id)
        assert found.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert unknown > 500, "of what neither side has"
    for _ in range(500):
        ids = choose.choices(range(len(theirs)), k=choose.randint(0, 20))
        assert found.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ids
    assert found.eos_token_ids == (theirs.eos_token_id,)


def test_a_translation_is_that_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    theirs = MarianTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    bundle = export_pair(checkpoint, tmp_path / "bundle").bundle
    with Decoder.open(bundle) as decoder:
        sources = [line for line in LINES if line][:4]
        outputs = decoder.generate(sources=sources, params=SamplingParams(max_new_tokens=12), drafter="lookup")
    for source, output in zip(sources, outputs, strict=True):
        settings = {"max_new_tokens": 12, "num_beams": 1, "do_sample": False, "bad_words_ids": [[2]]}
        said = model.generate(**theirs(source, return_tensors="pt"), **settings)[0]
        assert output.text == theirs.decode(said, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("bpe", "source.spm of checkpoint .* is no unigram model, and its texts could not be divided exactly"),
        ("lacking", "source.spm of checkpoint .* has pieces that vocab.json lacks \\(1: "),
        ("spaces", "source.spm of checkpoint .* keeps spaces as they are"),
        ("separate", "has tokens of its own on either side, expected one vocab.json for both"),
        ("ids", "vocab.json of checkpoint .* has no ids from 0 on with <unk> and </s> among them"),
        ("damaged", "source.spm of checkpoint .* is no model of sentencepiece"),
    ],
)
def test_what_could_not_be_exact_is_refused(checkpoint: Path, tmp_path: Path, change: str, reason: str) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    ids = json.loads((path / "vocab.json").read_text())
    if change == "bpe":
        train(path, "source", LINES, model_type="bpe")
    elif change == "spaces":
        train(path, "source", LINES, remove_extra_whitespaces=False)
    elif change == "lacking":
        last = pieces_of(path / "source.spm")[-1]
        (path / "vocab.json").write_text(json.dumps({name if name != last else "else": i for name, i in ids.items()}))
    elif change == "separate":
        (path / "target_vocab.json").write_text("{}")
    elif change == "ids":
        (path / "vocab.json").write_text(json.dumps(ids | {"<unk>": 1}))
    else:
        (path / "source.spm").write_bytes(b"damaged")
    with pytest.raises(ExportError, match=reason):
        read_vocabulary(open_checkpoint(path))
