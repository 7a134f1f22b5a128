"""A head is compared with a bigram that is counted on the same text, and one that is no better gets a note."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from trt_spec.export import export_bundle
from trt_spec.export.checking.bigram import FEWEST, Bigram, bigram_overlap
from trt_spec.export.checking.oracle import checkpoint_logits
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint

from ..kit.heads import parallel_heads
from ..kit.models import tiny_llama

WORDS = range(2, 62)  # tokens of the small models that stand for text


def test_a_bigram_says_what_followed_and_leaves_the_rest_to_how_often_tokens_are_seen() -> None:
    """By hand: 0 was followed by 1, 2 and 1; so two kinds in three places, which leave 2 / 5 to what is seen at all."""
    bigram = Bigram(torch.tensor([0, 1, 0, 2, 0, 1]), 4)
    alone = (torch.tensor([3.0, 2.0, 1.0, 0.0]) + 3 / 4) / 9
    torch.testing.assert_close(bigram.after(0), (torch.tensor([0.0, 2.0, 1.0, 0.0]) + 2 * alone) / 5)
    torch.testing.assert_close(bigram.after(3), alone)
    assert float(bigram.after(1).sum()) == pytest.approx(1)


def test_it_is_counted_on_the_first_part_of_a_text_and_measured_on_the_rest(tmp_path: Path) -> None:
    target = load_model(open_checkpoint(tiny_llama(tmp_path / "target")), "float32")
    tokens = [(7 * i * i + 3 * i + i // 9) % 60 + 2 for i in range(1200)]
    bigram, expected = Bigram(torch.tensor(tokens[:900]), 64), []
    for begin, end in ((900, 1156), (1156, 1200)):
        distributions = checkpoint_logits(target, tokens[begin:end]).softmax(-1)
        said = torch.stack([bigram.after(token) for token in tokens[begin:end]])
        expected += torch.minimum(distributions, said).sum(1).tolist()
    assert bigram_overlap(target, Sample(tokens, 64)) == pytest.approx(sum(expected) / 300, abs=1e-5)
    assert bigram_overlap(target, Sample(tokens[: FEWEST - 1], 64)) is None, "too short to tell"


def spoken(target: Path) -> str:
    """Let a small model speak, as text."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    others = [token for token in range(64) if token not in WORDS]
    torch.manual_seed(0)
    said = model.generate(
        torch.tensor([[one] for one in WORDS]), max_new_tokens=40, do_sample=True, suppress_tokens=others
    )
    return str(Tokenizer.from_file(str(target / "tokenizer.json")).decode(said.flatten().tolist()))


def test_a_head_that_is_no_better_than_a_bigram_gets_a_note(tmp_path: Path) -> None:
    """The same head, beside a bigram of what its target says, and beside one of what it never says."""
    target = tiny_llama(tmp_path / "target")
    head = parallel_heads(tmp_path / "head", target, "blockwise", scale=0.2)
    own, other = spoken(target), "ab" * 1200
    noted = [
        [
            note
            for note in export_bundle(target, tmp_path / "bundle", head, text=text, check=False).notes
            if "bigram" in note
        ]
        for text in (own, other)
    ]
    assert noted[1] == []
    [note] = noted[0]
    assert note.startswith(f"{head} is no better than a bigram counted on three quarters of the text, which overlaps")
    assert "use drafter ngram, which runs no model" in note
