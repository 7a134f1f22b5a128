"""Rounds that are replayed as on a GPU write the texts of plain ones, whatever rows they hold and however these end.

A CPU stands in for the GPU, as `kit/replaying.py` says. Rows end at unlike lengths, so that a round in flight often
holds one that has ended.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from trt_spec.engines.torch import regions
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.round import round as round_module
from trt_spec.runtime.round.result import RowResult
from trt_spec.runtime.scheduling import capture, seating
from trt_spec.runtime.scheduling.capture import Frames
from trt_spec.runtime.state.plan import Plan
from trt_spec.runtime.state.rows import STRETCH, Rows
from trt_spec.runtime.state.verdict import best_of

from ..kit.bundles import Pair
from ..kit.replaying import Machine, is_recording, replaying
from ..kit.rounds import GREEDY, LLAMA, OF_ALL_RUNS, SAMPLED, SCENES, TEXTS, Said, Scene, require_same, texts

PLAIN = Scene(LLAMA, [("model", 4)], SAMPLED, TEXTS)


def replayed(scene: Scene, pair: Pair, **options: Any) -> tuple[list[Said], Machine]:
    with replaying() as machine:
        return texts(scene, pair.bundle, "torch", **options), machine


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in OF_ALL_RUNS else pytest.mark.exhaustive) for one in SCENES]
)
def test_rounds_that_are_replayed_write_the_texts_of_plain_ones(name: str, request: pytest.FixtureRequest) -> None:
    scene = SCENES[name]
    bundle = scene.bundle(request)
    with replaying(kernels=scene.kernels) as machine:
        found = texts(scene, bundle, "torch")
    require_same(found, texts(scene, bundle), scene)
    assert not scene.recorded or sum(machine.launched) > 4 * len(scene.choices), "many rounds were replayed"
    assert not scene.ahead or machine.most_unread >= 2, "some were launched before the one before them was read"


def test_steps_that_read_live_entries_alone_are_recorded_once_however_long_texts_grow(llama: Pair) -> None:
    """Else once for each length of the cache's first entries that they read: 16, 32, 64."""

    def records(*, kernels: bool) -> int:
        with replaying(kernels=kernels) as machine:
            found = texts(replace(PLAIN, prompts=TEXTS[:1], lengths=[50]), llama.bundle, "torch")
        assert len(found[0].tokens) == 50
        return len(machine.launched)

    assert records(kernels=True) == 2
    assert records(kernels=False) > 2


def test_compiled_steps_are_compiled_before_they_are_recorded_and_replayed_region_by_region(llama: Pair) -> None:
    """The operations of a region stand for its code; a step is cut after each ten operations."""

    def compiled(module: Any, *_: Any, **__: Any) -> Any:
        assert not is_recording()
        return module

    with (
        replaying() as machine,
        patch.object(torch._inductor, "standalone_compile", compiled),
        patch.object(regions, "repeats", lambda tokens, _: list(range(0, len(tokens), 10))),
    ):
        found = texts(PLAIN, llama.bundle, "torch-compiled")
    require_same(found, texts(PLAIN, llama.bundle), PLAIN)
    assert sum(machine.launched) > 4


def test_a_request_that_is_cancelled_disturbs_no_other(llama: Pair) -> None:
    expected = texts(PLAIN, llama.bundle)
    found, _ = replayed(PLAIN, llama, cancelled=1)
    assert 8 < len(found[1].tokens) < len(expected[1].tokens)
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.tokens == (theirs.tokens[: len(ours.tokens)] if row == 1 else theirs.tokens)


def test_searches_with_beams_go_on_beside_rounds_that_are_replayed(llama: Pair) -> None:
    def found(engine: str) -> list[tuple[int, ...]]:
        greedy = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
        with Decoder.open(llama.bundle, engine, max_batch=3) as decoder:
            searching = decoder.submit("def f(", SamplingParams(num_beams=3, temperature=0, max_new_tokens=12))
            others = [decoder.submit(prompt, greedy, draft_length=3) for prompt in TEXTS[1:]]
            while decoder.step():
                pass
            return [tuple(one.token_ids) for one in (searching, *others)]

    with replaying() as machine:
        ours = found("torch")
    assert ours == found("onnxruntime")
    assert sum(machine.launched) > 4


# Faults that a GPU would have shown.


def test_a_column_that_is_made_anew_is_noticed(llama: Pair) -> None:
    """What the record reads then belongs to nobody."""
    admit = seating.admit

    def anew(rows: Rows, *arguments: Any) -> None:
        rows.columns["unlikely"] = rows.columns["unlikely"].clone()
        admit(rows, *arguments)

    with patch.object(seating, "admit", anew), pytest.raises(AssertionError, match="nobody owns"):
        replayed(PLAIN, llama)


def test_a_frame_that_is_made_anew_is_noticed(llama: Pair) -> None:
    of = Frames.of

    def anew(self: Frames, *arguments: Any, **options: Any) -> Any:
        self._made.clear()
        return of(self, *arguments, **options)

    with patch.object(Frames, "of", anew), pytest.raises(AssertionError, match="nobody owns"):
        replayed(PLAIN, llama)


def test_a_constant_that_is_first_asked_for_while_a_round_is_recorded_is_noticed(llama: Pair) -> None:
    """The record that asks first makes it whenever it is replayed; the other reads what may not have been made yet."""
    commit = round_module.commit

    @cache
    def late() -> Tensor:
        return torch.arange(3)

    def planted(*arguments: Any) -> None:
        if is_recording():
            late().sum()
        commit(*arguments)

    with patch.object(round_module, "commit", planted), pytest.raises(AssertionError, match="another recording"):
        replayed(PLAIN, llama)


def test_a_number_that_is_read_on_the_host_while_a_round_is_recorded_is_noticed(llama: Pair) -> None:
    commit = round_module.commit

    def planted(rows: Rows, *arguments: Any) -> None:
        if is_recording():
            int(rows.length[0])
        commit(rows, *arguments)

    with patch.object(round_module, "commit", planted), pytest.raises(AssertionError, match="reads a number"):
        replayed(PLAIN, llama)


def test_uniforms_that_a_live_row_lacks_are_noticed(llama: Pair) -> None:
    fill, long = Rows.fill_uniforms, replace(PLAIN, prompts=[[5, 6, 7] * 20] * 4)

    def first_block(self: Rows, first: int, count: int, lengths: range, beyond: bool = False) -> None:
        if lengths.start < STRETCH:
            fill(self, first, count, lengths, beyond)

    with patch.object(Rows, "fill_uniforms", first_block):
        found, _ = replayed(long, llama)
    assert found != texts(long, llama.bundle)


@pytest.mark.parametrize("scene", [PLAIN, replace(PLAIN, params=GREEDY)], ids=["sampled", "greedy"])
def test_nothing_is_read_of_a_row_that_has_ended(llama: Pair, scene: Scene) -> None:
    """Whatever it has become: here each that takes part in a round after its end says NaN there."""
    read, ended = capture.read_table, []

    def broken(
        table: Tensor, plan: Plan, unchecked: Tensor | torch.dtype | None, rows: Sequence[int]
    ) -> list[RowResult]:
        table = table.clone()
        others = [row for row in range(plan.batch) if row not in rows]
        ended.extend(others)
        table[others, 1] = -1
        if isinstance(unchecked, torch.dtype):
            best_of(table, plan.draft_length + 1, unchecked)[others] = torch.nan
        return read(table, plan, unchecked, rows)

    with patch.object(capture, "read_table", broken):
        found, _ = replayed(scene, llama)
    assert found == texts(scene, llama.bundle)
    assert ended, "rounds were launched ahead that hold rows which have ended"
