"""A published chat model from its file to its texts: exported, certified, and greedy as transformers is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder, SamplingParams

from .chats import QUESTIONS
from .conftest import NEW_TOKENS, Reference, command

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]
KINDS = {"none": 1e-8, "int8": 0.02, "int4": 0.5}  # and the divergence from the checkpoint that rounding may cost
Exported = Callable[..., tuple[Path, str]]


@pytest.mark.parametrize("weights", KINDS)
def test_its_file_is_exported_and_the_check_passes(exported: Exported, weights: str):
    bundle, said = exported(weights)
    check = Bundle.open(bundle).target.check
    assert 0 < check["worst_error"] < check["tolerance"]
    assert check["quality"]["divergence"] < KINDS[weights]
    assert "%|" not in said, "no library draws its own progress bars into ours"


def test_ten_greedy_answers_are_those_of_transformers(exported: Exported, reference: Reference):
    bundle, _ = exported("none")
    with Decoder.open(bundle, max_batch=4) as decoder:
        said = decoder.generate(
            [reference.prompt(question) for question in QUESTIONS], SamplingParams(max_new_tokens=NEW_TOKENS)
        )
    assert [output.token_ids for output in said] == [reference.answer(question) for question in QUESTIONS]


@pytest.mark.parametrize("weights", ["none", "int8"])  # in ONNX Runtime an int4 token has other bits alone
def test_copies_change_no_answer(exported: Exported, reference: Reference, weights: str):
    """As stored, the model says what it says, whatever proposes: so also where rounding has made it another."""
    bundle, _ = exported(weights)
    asked = [reference.prompt(question) for question in QUESTIONS]
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    with Decoder.open(bundle, max_batch=1) as decoder:
        plain = [output.token_ids for output in decoder.generate(asked, params, draft_length=0)]
        for drafter in ("lookup", "suffix"):
            outputs = decoder.generate(asked, params, draft_length=4, drafter=drafter)
            assert [output.token_ids for output in outputs] == plain
            assert sum(sum(output.speculation.histogram) for output in outputs) > 0, "it did propose"


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_it_is_certified(exported: Exported, file: Path, weights: str, tmp_path: Path):
    bundle, _ = exported(weights)
    command("verify", bundle, "--quick", "--checkpoint", file, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"]
    assert {one["check"] for one in found["findings"]} >= {"checkpoint", "same text", "rollback", "distribution"}
