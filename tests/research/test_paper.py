"""What is measured of the paper is what it defines: α on what the target says, and the cost of a larger model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trt_spec.runtime import Decoder
from trt_spec.tools.research import paper
from trt_spec.tools.research.paper import (
    Said,
    deepened,
    lenient_overlap,
    measure_alphas,
    rounded,
    telegram_alphas,
)
from trt_spec.tools.research.paper_tables import OURS
from trt_spec.tools.research.shipped import TELEGRAMS
from trt_spec.tools.research.telegrams import is_held_out, library_sentences
from trt_spec.tools.theory.lines import lenient_acceptance

from ..kit.bundles import Pair

pytestmark = pytest.mark.research

DISTRIBUTIONS = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.5, 0.25]])  # after each token


class Chain:
    """A model whose distribution goes by the last token alone."""

    config = SimpleNamespace(vocab_size=3)

    def __init__(self, distributions: torch.Tensor) -> None:
        self._distributions = distributions

    def __call__(self, tokens: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self._distributions[tokens].log())


def test_alpha_is_the_mean_overlap_where_the_target_said_something():
    """By hand: after tokens 0, 1 and 2, once each, with a draft that swaps the distributions after 0 and 1."""
    said = {temperature: [Said([1, 2], [2, 0]), Said([0], [2])] for temperature in (0.0, 1.0)}
    target, draft, counted = Chain(DISTRIBUTIONS), Chain(DISTRIBUTIONS[[1, 0, 2]]), torch.tensor([0, 1, 0, 1, 0, 2])
    found = measure_alphas(("target", "draft"), (target, draft), counted, said)
    assert found["tokens"] == [3, 3]
    overlap = 0.1 + 0.2 + 0.2  # of the distributions after 0 and 1; the draft's distribution after 2 is right
    assert found["alphas"][2] == ["target", "draft", *map(rounded, (1 / 3, (2 * overlap + 1) / 3))]
    assert found["alphas"][0][2] == rounded(1 / 3), "the commonest, but 0 which begins texts, is 1"
    assert found["lenient"][2][2] == found["alphas"][2][3]
    halved = sum(lenient_acceptance(*DISTRIBUTIONS[[a, b]].tolist(), 0.5) for a, b in ((0, 1), (1, 0), (2, 2))) / 3
    assert found["lenient"][2][3] == rounded(halved)


def test_lenience_is_that_of_the_theory():
    p, q = DISTRIBUTIONS, DISTRIBUTIONS[[2, 0, 1]]
    expected = [lenient_acceptance(one, other, 0.3) for one, other in zip(p.tolist(), q.tolist(), strict=True)]
    assert lenient_overlap(p, q, 0.3) == pytest.approx(sum(expected) / 3)


@torch.no_grad()
def test_a_deepened_decoder_says_the_same(tmp_path: Path):
    from transformers import AutoModelForSeq2SeqLM

    ids = torch.tensor([[7, 8, 9, 1]])
    logits = [
        AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32)(input_ids=ids, decoder_input_ids=ids).logits
        for path in (TELEGRAMS, deepened(TELEGRAMS, tmp_path / "deep", 5))
    ]
    assert torch.equal(*logits)
    assert json.loads((tmp_path / "deep/config.json").read_text())["num_decoder_layers"] == 5


def test_all_is_measured_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, less in {"LAYERS": 3, "SAID": 4, "TIMED": 2, "CONTINUED": 16, "COUNTED": 2**14}.items():
        monkeypatch.setattr(paper, name, less)
    assert paper.main(["--work", str(tmp_path / "work"), "--repeats", "1", "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert [len(found[pair]["alphas"]) for pair in ("telegrams", "pycode")] == [3, 3]
    assert len(found["runs"]) == 6
    assert all(one["measured"] > 0 for one in found["runs"])


def test_what_is_recorded_of_the_shipped_models_is_what_is_measured(telegrams: Pair) -> None:
    """Docstrings differ a little from one version of Python to the next."""
    sentences = library_sentences()
    learned, held_out = ([one for one in sentences if is_held_out(one) == out] for out in (False, True))
    with Decoder.open(telegrams.bundle, max_batch=1) as decoder:
        found = telegram_alphas(decoder, learned, held_out)
    recorded = json.loads(OURS.read_text())["telegrams"]
    for table in ("alphas", "lenient"):
        for now, then in zip(found[table], recorded[table], strict=True):
            assert now[:2] == then[:2]
            assert now[2:] == pytest.approx(then[2:], abs=0.03)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path: Path, capsys) -> None:
    missing = tmp_path / "missing" / "out.json"
    assert paper.main(["--work", str(tmp_path / "work"), "--json", str(missing)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paper: error: output {missing} cannot be written")
    assert not (tmp_path / "work").exists()
