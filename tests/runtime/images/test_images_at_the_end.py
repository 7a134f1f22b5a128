"""A round reads no entry of an image: drafts have read all before, also where a prompt ends with one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, Request, SamplingParams

from ...kit.heads import eagle3_head
from ...kit.seeing_models import Seeing, image, seeing
from ...kit.shards import give_up_a_place

PARAMS = SamplingParams(max_new_tokens=40, temperature=1.0, rule="rejection", seed=3, ignore_eos=True)
RULES = pytest.mark.parametrize("rule", ["rejection", "tokenwise"])
IMAGES = [image(40, 30)]
ALL_KEPT = 1 << 24  # bytes of prefixes


@pytest.fixture(scope="module")
def unlike(llava: Seeing, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that sees, with a draft of other weights and a head, which are often rejected."""
    folder = tmp_path_factory.mktemp("unlike")
    seeing("llava", folder / "draft", seed=1)
    head = eagle3_head(folder / "head", llava.path, read=(0, 1), scale=0.3)
    export_bundle(llava.path, folder / "bundle", [folder / "draft", head], images=True)
    return folder / "bundle"


def begin(decoder: Decoder, most: int, **drafting: Any) -> None:
    """Let a neighbour begin that says so many tokens."""
    decoder.submit("only text", replace(PARAMS, max_new_tokens=most), **drafting)
    decoder.step()


def text_of(decoder: Decoder, request: Request, preempted_after: int | None = None) -> list[int]:
    """Return what a request says, which gives up its place after so many tokens until its neighbour has ended."""
    while not request.finished:
        if preempted_after is not None and len(request.token_ids) >= preempted_after:
            give_up_a_place(decoder)
            preempted_after = None
        decoder.step()
    assert preempted_after is None
    assert request.error is None
    return request.token_ids


@pytest.mark.exhaustive
@RULES
@pytest.mark.parametrize("drafter", ["model", "eagle3"])
@pytest.mark.parametrize("before", ["", "x" * 70])
def test_a_text_is_the_same_after_a_preemption_and_with_a_prefix(
    llava: Seeing, unlike: Path, rule: str, drafter: str, before: str
):
    asked = f"{before}{llava.placeholder}", replace(PARAMS, rule=rule)
    given: dict[str, Any] = {"images": IMAGES, "drafter": drafter, "draft_length": 4}
    with Decoder.open(unlike, prefix_bytes=ALL_KEPT) as decoder:
        expected = text_of(decoder, first := decoder.submit(*asked, **given))
        again = text_of(decoder, decoder.submit(*asked, **given))
        for after in (1, 2, 4):
            begin(decoder, 20, draft_length=0)
            assert text_of(decoder, decoder.submit(*asked, **given), after) == expected
    assert again == expected
    assert 0 < first.speculation.accepted < first.speculation.proposed


@pytest.mark.exhaustive
@RULES
@pytest.mark.parametrize("after", ["", "?", " is it?"])
def test_a_text_does_not_depend_on_how_many_tokens_a_head_reads_again_for_others(
    llava: Seeing, unlike: Path, rule: str, after: str
):
    """A head reads again as many tokens as the longest line of the batch has."""
    asked = f"{llava.placeholder}{after}", replace(PARAMS, rule=rule)
    given: dict[str, Any] = {"images": IMAGES, "drafter": "eagle3", "draft_length": 2}
    with Decoder.open(unlike) as decoder:
        expected = text_of(decoder, decoder.submit(*asked, **given))
    with Decoder.open(unlike) as decoder:
        begin(decoder, 90, drafter="eagle3", draft_length=8)
        assert text_of(decoder, decoder.submit(*asked, **given)) == expected


@pytest.mark.parametrize("after", ["", " is what?"])
def test_a_draft_that_is_its_target_is_accepted_at_once(llava: Seeing, after: str):
    """Also where a neighbour's lines make it read many tokens again."""
    asked = f"{llava.placeholder}{after}", PARAMS
    given: dict[str, Any] = {"images": IMAGES, "drafter": "model", "draft_length": 4}
    with Decoder.open(llava.bundle) as decoder:
        begin(decoder, 90, drafter="lookup+model", draft_length=8)
        request = decoder.submit(*asked, **given)
        text_of(decoder, request)
    assert request.speculation.acceptance == 1
