"""The encoder–decoders that write out telegrams: the task, and their training from nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trt_spec.engines import RequestError
from trt_spec.tools.research import telegrams
from trt_spec.tools.research import train_telegrams as tool
from trt_spec.tools.research.telegrams import SMALL, is_held_out, library_sentences, telegram
from trt_spec.tools.research.train_telegrams import Size, Telegrams, deeper, new_t5, telegram_tokenizer, train_telegrams

pytestmark = pytest.mark.research

NAMES = ("name", "value", "list", "file", "node", "length", "index", "key", "path", "line")
SENTENCES = [f"{verb} the {one} of the {other}." for verb in ("Return", "Set") for one in NAMES for other in NAMES]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SMALL_PAIR = {
    "size": Size(32, 1, 32),
    "layers": 2,
    "vocab_size": 400,
    "batch": 8,
    "steps": 12,
    "draft_steps": 9,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads would wait for one another longer than such small models take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_telegram_leaves_out_small_words_capitals_and_signs():
    assert telegram("If given, return the names of all nodes that are in a graph.") == (
        "if given return names all nodes that graph"
    )
    assert all(not SMALL & set(telegram(one).split()) for one in SENTENCES)


def test_sentences_are_the_ordinary_ones_of_docstrings_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "good.py").write_text(
        '"""Keep the names of files.\n\nThe list is kept\nfor later use. See f(x). It has 3 of them."""\n'
        'def f():\n    """Keep the names of files. No."""\n    "Nor is this a docstring here."\n'
    )
    (tmp_path / "no_python.py").write_text('"""Nobody can parse what follows here."""\ndef f(:\n')
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/other.py").write_text('"""This is in some package of others."""\n')
    monkeypatch.setattr(telegrams.sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    assert library_sentences() == ["Keep the names of files.", "The list is kept for later use."]
    assert 0.02 < sum(map(is_held_out, SENTENCES)) / len(SENTENCES) < 0.1


def test_batches_are_drawn_by_their_seed_and_padded_behind_their_ends():
    tokenizer = telegram_tokenizer(SENTENCES, 400)
    first, second = (Telegrams(tokenizer, SENTENCES, 4, seed=1) for _ in range(2))
    drawn = first.draw()
    assert torch.equal(drawn, second.draw())
    assert not torch.equal(drawn, Telegrams(tokenizer, SENTENCES, 4, seed=2).draw())
    for source, text in zip(*drawn.tolist(), strict=True):
        sentence = tokenizer.decode(text)
        assert tokenizer.decode(source) == telegram(sentence)
        assert sentence in SENTENCES
        for row in (source, text):
            assert row.count(1) == 1
            assert not any(row[row.index(1) + 1 :])


def test_a_deeper_model_says_the_same():
    torch.manual_seed(0)
    model = new_t5(Size(32, 1, 32), 50)
    grown = deeper(model, Size(32, 3, 32), 50)
    ids = torch.tensor([[7, 8, 9, 1]])
    assert torch.equal(*(one(input_ids=ids, labels=ids).logits for one in (model, grown)))
    assert sum(one.numel() for one in grown.parameters()) > sum(one.numel() for one in model.parameters())


def test_a_pair_learns_and_leaves_nothing_but_its_checkpoints(tmp_path: Path):
    found = train_telegrams(tmp_path / "pair", SENTENCES, **SMALL_PAIR | {"draft_steps": 60})
    assert found["target_loss"] < 4, "it has learned something: the logarithm of 400 is 6"
    assert 0 < found["acceptance"][1.0] < 1
    assert list(tmp_path.iterdir()) == [tmp_path / "pair"]
    for model in ("target", "draft"):
        files = {file.name for file in (tmp_path / "pair" / model).iterdir()}
        assert files == {*("config.json", "generation_config.json", "model.safetensors"), *TOKENIZER}


@pytest.mark.parametrize("dies_at", [("target", 5), ("draft", 4)])
def test_a_training_that_was_killed_goes_on_to_the_same_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: tuple[str, int]
):
    whole = train_telegrams(tmp_path / "whole", SENTENCES, **SMALL_PAIR)
    """It saves nothing as it dies."""
    real, steps, dead = tool.State.save, [], []

    def save(self: tool.State, optimizer: Any, step: int) -> None:
        if dead == ["now"]:
            return
        if step == (steps[-1][1] if steps and steps[-1][0] == self.folder.name else 0):
            return  # at the end as well
        real(self, optimizer, step)
        steps.append((self.folder.name, step))
        if steps[-1] == dies_at:
            dead.append("now")
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("trt_spec.tools.making.learning.SAVED", 0.0)
        patched.setattr(tool.State, "save", save)
        with pytest.raises(KeyboardInterrupt):
            train_telegrams(tmp_path / "again", SENTENCES, **SMALL_PAIR)
        dead.append("long ago")
        assert train_telegrams(tmp_path / "again", SENTENCES, **SMALL_PAIR) == whole
    assert len(set(steps)) == len(steps) == SMALL_PAIR["steps"] + SMALL_PAIR["draft_steps"], "no step is done twice"
    for model in ("target", "draft"):
        first, second = (load_file(tmp_path / run / model / "model.safetensors") for run in ("whole", "again"))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_training_goes_on_only_with_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tool, "measure", killed)
        with pytest.raises(KeyboardInterrupt):
            train_telegrams(tmp_path / "pair", SENTENCES, **SMALL_PAIR)
    with pytest.raises(RequestError, match="holds a training with --seed 0, and not 1"):
        train_telegrams(tmp_path / "pair", SENTENCES, **SMALL_PAIR, seed=1)
    assert not (tmp_path / "pair").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--steps", "0"), "--steps is 0, expected at least 1"),
        (("--draft-steps", "0"), "--draft-steps is 0, expected at least 1"),
        (("--seed", "-1"), "--seed is -1, expected at least 0"),
        (("--device", "warp"), "--device is 'warp', which torch cannot use here"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_before_any_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: Any, said: str
):
    monkeypatch.setattr(tool, "all_sentences", list)
    assert tool.main(["--out", str(tmp_path / "pair"), *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())
