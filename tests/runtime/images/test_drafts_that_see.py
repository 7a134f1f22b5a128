"""Drafts and heads read an image's embeddings where the target does, and no text depends on whether they do."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import onnx
import pytest
import torch
from onnx import numpy_helper
from trt_spec.engines import IMAGES, Bundle, blank_cache, cache_rows, make_step, open_engine
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, Output, Request, SamplingParams
from trt_spec.runtime.lengths.chooser import Chooser
from trt_spec.runtime.memory.image_rows import ImageRows
from trt_spec.runtime.memory.sight import Sight
from trt_spec.runtime.scheduling import reading
from trt_spec.runtime.state.asked import Share
from trt_spec.runtime.state.shapes import line

from ...kit.heads import eagle3_head, mtp_head, parallel_heads
from ...kit.models import tiny_llama
from ...kit.seeing_models import TOKENS, Seeing, image

LATER = pytest.mark.exhaustive
KINDS = ["llava", *(pytest.param(kind, marks=LATER) for kind in ("gemma3", "qwen3_vl", "qwen2_5_vl", "mistral3"))]
SAMPLED = SamplingParams(max_new_tokens=60, temperature=1.0, rule="coupled", seed=3, ignore_eos=True)
ALL_KEPT = 1 << 24  # bytes of prefixes


@contextmanager
def blind(decoder: Decoder) -> Iterator[None]:
    """Let drafts read the token that stands for an image, as those do whose embeddings have another size."""
    drafts = [one.images for one in decoder._models.drafts]
    among = ImageRows.among

    def without(self: ImageRows, ids: torch.Tensor, *where: object) -> object:
        return (ids, {}) if self in drafts else among(self, ids, *where)  # type: ignore[arg-type]

    with patch.object(ImageRows, "among", without):
        yield


def accepted(output: Output) -> float:
    found = output.speculation
    return found.accepted / found.proposed


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_is_its_target_is_accepted_after_images_as_long_as_it_sees(
    seeing_of: Callable[[str], Seeing], kind: str
):
    one = seeing_of(kind)
    prompts = one.prompts()
    asked = [text for text, _ in prompts], SAMPLED
    given = {"images": [own for _, own in prompts], "drafter": "model", "draft_length": 4}
    with Decoder.open(one.bundle) as decoder:
        plain = decoder.generate(*asked, images=given["images"], draft_length=0)  # type: ignore[arg-type]
        seen = decoder.generate(*asked, **given)  # type: ignore[arg-type]
        with blind(decoder):
            unseen = decoder.generate(*asked, **given)  # type: ignore[arg-type]
    assert [one.token_ids for one in plain] == [one.token_ids for one in seen] == [one.token_ids for one in unseen]
    assert [accepted(one) for one in seen] == [1.0] * len(prompts)
    with_images = [bool(own) for _, own in prompts]
    assert any(accepted(one) < 1 for one, has in zip(unseen, with_images, strict=True) if has)
    assert all(accepted(one) == 1 for one, has in zip(unseen, with_images, strict=True) if not has)


def test_calls_go_on_to_the_end_of_an_image(seeing_of: Callable[[str], Seeing]):
    """Gemma's tokens of an image see each other."""
    one = seeing_of("gemma3")
    prompt, images = f"what is this? {one.placeholder} is what?", [image(40, 30)]
    [(begin, end)], rows = one.runs(prompt, images), ImageRows(Bundle.open(one.bundle).target.contract, "cpu", 1)
    token = Bundle.open(one.bundle).vision.contract.token  # type: ignore[union-attr]
    pictures = one.read(images)
    ids = one.ids(prompt, pictures)
    rows.seat(0, Sight.of(ids, pictures, token))
    rest = len(ids) - begin - 1
    assert rows.widths(0, 0, [begin + 1, rest]) == [end, len(ids) - end]


def test_a_draft_sees_images_that_its_target_has_in_a_prefix(llava: Seeing):
    """The target then has no need of their entries; a draft that comes later has to have them seen again."""
    text, images = llava.prompts()[0]
    with Decoder.open(llava.bundle, prefix_bytes=ALL_KEPT) as decoder:
        decoder.generate(text, SAMPLED, images=[images], draft_length=0)
        [output] = decoder.generate(text, SAMPLED, images=[images], drafter="model", draft_length=4)
        assert output.usage.cached_tokens > 0
        assert accepted(output) == 1
        assert decoder._models.images is not None
        assert decoder._models.images.end(0) == 0, "no row holds entries that all have read"


@contextmanager
def seeing_beside(decoder: Decoder, other: Request) -> Iterator[list[int]]:
    """Note how many tokens another request has whenever an image is seen, of which none is known."""
    eyes = decoder._models.eyes
    assert eyes is not None
    eyes.forget()
    noted, see = list[int](), eyes._seen
    with patch.object(eyes, "_seen", lambda *given: noted.append(len(other.token_ids)) or see(*given)):
        yield noted


AN_IMAGE = 16  # entries
THREE = [image(40 + number, 30, number) for number in range(3)]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_other_requests_go_on_while_a_draft_is_shown_one_image_after_another(llava: Seeing, rule: str):
    """But what a text that depends on its draft proposes depends on no one else."""
    text, params = f"{llava.placeholder * 3} are three", replace(SAMPLED, rule=rule)
    with Decoder.open(llava.bundle) as decoder:
        one = decoder.submit(text, params, images=THREE, draft_length=0)
        other = decoder.submit("only text", SAMPLED, draft_length=0)
        while not (one.token_ids and other.token_ids):
            decoder.step()
        one.draft(4, "model")
        with seeing_beside(decoder, other) as noted:
            began = len(other.token_ids)
            while decoder.step():
                pass
    assert noted == ([began, began + 1, began + 2] if rule == "coupled" else [began] * 3)
    assert one.speculation.acceptance == 1


def test_a_request_that_waits_for_its_draft_to_see_keeps_no_other_waiting(llava: Seeing):
    text, params = f"{llava.placeholder * 3}{' and so on' * 9}", replace(SAMPLED, rule="rejection")
    drafting = {"drafter": "model", "draft_length": 4}
    with Decoder.open(llava.bundle) as decoder:
        [expected] = decoder.generate(text, params, images=[THREE], **drafting)  # type: ignore[arg-type]
    with Decoder.open(llava.bundle, prefix_bytes=ALL_KEPT) as decoder:
        decoder.generate(text, params, images=[THREE], draft_length=0)  # so that only the draft lacks images
        other = decoder.submit("only text", SAMPLED, draft_length=0)
        while not other.token_ids:
            decoder.step()
        began = len(other.token_ids)
        with seeing_beside(decoder, other) as noted, patch.object(reading, "PREFILL_WIDTH", AN_IMAGE):
            one = decoder.submit(text, params, images=THREE, **drafting)  # type: ignore[arg-type]
            while decoder.step():
                pass
    assert noted == [began, began + 1, began + 2]
    assert one.token_ids == list(expected.token_ids)


def test_a_draft_that_is_tried_now_and_then_is_shown_more_images_than_are_kept(llava: Seeing):
    """Drafter mixed asks a draft for a round or two, in which it is shown an image each."""
    with Decoder.open(llava.bundle) as decoder:
        assert decoder._models.eyes is not None
        decoder._models.eyes._most = 0  # bytes; the last image is kept in any case
        request = decoder.submit(f"{llava.placeholder * 3} are three", SAMPLED, images=THREE, draft_length=0)
        while not request.token_ids:
            decoder.step()
        [occupant] = decoder._scheduler.live
        for _ in range(4):
            for name in ("lookup", "model"):
                occupant.chooser = ByTurns(name)
                decoder.step()
        assert decoder._scheduler.by_drafter["model"].proposed > 0


class ByTurns(Chooser):
    """Wants one of two drafters."""

    drafters = "lookup", "model"

    def __init__(self, name: str) -> None:
        super().__init__(Share.of(line(4), name))


def test_entries_of_images_go_when_all_that_see_have_read_them(llava: Seeing):
    text, images = llava.prompts()[0]
    with Decoder.open(llava.bundle) as decoder:
        rows = decoder._models.images
        assert rows is not None
        for drafting in ({"drafter": "model", "draft_length": 2}, {"drafter": "lookup"}):
            request = decoder.submit(text, SAMPLED, images=images, **drafting)  # type: ignore[arg-type]
            held = []
            while not request.token_ids:
                decoder.step()
                held.append(rows.end(0) > 0)
            decoder.step()
            assert request.token_ids
            assert rows.end(0) == 0
            decoder.cancel(request)
            decoder.step()


def test_a_draft_of_another_size_reads_the_token_and_changes_no_text(llava: Seeing, tmp_path: Path):
    small = tiny_llama(tmp_path / "small", TOKENS, hidden_size=16)
    same = tiny_llama(tmp_path / "same", TOKENS)
    for draft in (small, same):
        shutil.copy(llava.path / "tokenizer.json", draft)
    report = export_bundle(llava.path, tmp_path / "bundle", [small, same], images=True)
    sizes = {one.role: one.entry.contract.image_size for one in report.models}
    assert sizes == {"target": 32, "draft": 0, "draft2": 32}
    text, images = llava.prompts()[0]
    with Decoder.open(tmp_path / "bundle") as decoder:
        texts = {
            decoder.generate(text, SAMPLED, images=[images], drafter=drafter)[0].token_ids
            for drafter in ("model", "model2", "lookup")
        }
    assert len(texts) == 1


@pytest.fixture(scope="module")
def headed(llava: Seeing, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that sees, with heads of all kinds that read embeddings, and one that reads none."""
    folder = tmp_path_factory.mktemp("headed")
    heads = [
        eagle3_head(folder / "eagle3", llava.path, read=(0, 1), scale=0.3),
        eagle3_head(folder / "peagle", llava.path, read=(0, 1), scale=0.3, mask=1),
        mtp_head(folder / "mtp", llava.path, kind="llama", scale=0.3),
        parallel_heads(folder / "medusa", llava.path, "medusa"),
    ]
    export_bundle(llava.path, folder / "bundle", heads, images=True)
    return folder / "bundle"


@pytest.mark.parametrize("head", ["eagle3", "peagle", "mtp"])
def test_a_head_reads_an_entry_as_the_token_whose_embedding_it_is(headed: Path, head: str):
    bundle = Bundle.open(headed)
    engine = open_engine("onnxruntime", bundle.graph(head), bundle.models[head].contract)
    graph = onnx.load(bundle.graph(head))
    tables = [numpy_helper.to_array(one, str(headed / head)) for one in graph.graph.initializer]
    [table] = [torch.from_numpy(one.copy()) for one in tables if one.shape == (engine.contract.vocab_size, 32)][:1]
    ids, generator = torch.tensor([[5, 7, 11, 13, 17]]), torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 5, 32, generator=generator)

    def said(ids: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        cache = blank_cache(engine.contract, 1, 64)
        logits = torch.zeros(1, 5, engine.contract.vocab_size)
        given = {"input_ids": ids, "start": torch.tensor([1]), "past_hidden": hidden, f"past_{IMAGES}": entries}
        make_step(engine, cache_rows(engine.contract, cache, 0, 1), given, {"logits": logits}).run()
        return logits

    expected = said(ids, torch.zeros(1, 32))
    named = ids.clone()
    named[0, 1:3] = engine.contract.vocab_size + torch.tensor([1, 0])
    entries = table[[11, 7]]
    torch.testing.assert_close(said(named, entries), expected)
    assert not torch.allclose(said(named, entries.flip(0)), expected, atol=1e-3)
    engine.close()


@pytest.mark.parametrize("head", ["eagle3", "peagle", "mtp", "medusa"])
def test_a_head_proposes_by_what_it_sees_and_changes_no_text(llava: Seeing, headed: Path, head: str):
    prompts = llava.prompts()
    asked, images = [text for text, _ in prompts], [own for _, own in prompts]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with Decoder.open(headed) as decoder:
        drafting = {"drafter": head, "draft_length": 3, "trace": True}
        seen = decoder.generate(asked, params, images=images, **drafting)
        with blind(decoder):
            unseen = decoder.generate(asked, params, images=images, **drafting)
    expected = [llava.said(*prompt, 24, eos_token_id=None) for prompt in prompts]
    assert [list(one.token_ids) for one in seen] == expected
    assert [list(one.token_ids) for one in unseen] == expected
    proposed = [[[one.proposal for one in output.trace] for output in some] for some in (seen, unseen)]
    assert (proposed[0] != proposed[1]) == (head != "medusa")
    assert proposed[0][2] == proposed[1][2], "this prompt has no image"
