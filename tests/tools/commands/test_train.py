"""`trt-spec train` teaches a kind, says how long is left, and refuses what a kind does not read."""

import json
import re
from pathlib import Path

import pytest
from trt_spec.tools.making.heads import LESSONS
from trt_spec.tools.training_settings import DRAFT, KINDS

from ...kit.models import tiny_llama
from ..conftest import assert_refused

SMALL = ("--samples", 20, "--length", 24, "--steps", 6)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("train")
    (folder / "prompts").write_text("abc\ndef f(\n")
    return ("--target", tiny_llama(folder / "target"), "--prompts", folder / "prompts")


def test_a_draft_is_taught_and_its_acceptance_printed(run, asked, tmp_path: Path):
    said = run("train", DRAFT, *asked, "--out", tmp_path / "draft", *SMALL, "--cut", 1)
    assert said.code == 0
    found = json.loads(said.out)
    assert found.keys() >= {"parameters", "continuations", "before", "after"}
    assert found["steps"] == 6
    assert re.search(r"step \d of 6: loss [\d.]+, about \d+ s left", said.err)
    assert (tmp_path / "draft" / "model.safetensors").exists()


def test_a_head_is_taught_and_its_acceptance_by_place_printed(run, asked, tmp_path: Path):
    said = run("train", "medusa", *asked, "--out", tmp_path / "head", *SMALL, "--heads", 2)
    assert said.code == 0
    assert json.loads(said.out).keys() >= {"before", "quarters", "after", "bigram", "bytes", "minutes"}
    assert re.search(r"step \d of 6: loss [\d.]+, about \d+ s left", said.err)
    assert [file.name for file in tmp_path.iterdir()] == ["head"]


def test_every_kind_but_a_draft_has_a_lesson():
    assert [DRAFT, *LESSONS] == [*KINDS]


def test_a_kind_that_is_not_known_is_refused_with_those_that_are(run, asked, tmp_path: Path):
    refused = run("train", "medua", *asked, "--out", tmp_path / "out")
    assert_refused(
        refused, f"invalid choice: 'medua' (choose from {', '.join(map(repr, KINDS))}); did you mean medusa?"
    )


def test_what_torch_cannot_use_is_refused_and_nothing_is_written(run, asked, tmp_path: Path):
    for kind in (DRAFT, "medusa"):
        refused = run("train", kind, *asked, "--out", tmp_path / "out", "--device", "warp")
        assert_refused(refused, "--device is 'warp', which torch cannot use here")
    assert not list(tmp_path.iterdir())
