"""Rounds that are replayed as on a GPU write the texts of plain ones, whatever rows they hold and however these end.

A CPU stands in for the GPU, as `kit/replaying.py` says. Rows end at unlike lengths, so that a round in flight often
holds one that has ended; some are cancelled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from trt_spec.engines import EngineError
from trt_spec.runtime import Decoder, EntropyRule, Request, SamplingParams
from trt_spec.runtime.scheduling import occupants
from trt_spec.runtime.scheduling.capture import Rounds
from trt_spec.runtime.state import indexing
from trt_spec.runtime.state.asked import DraftLength
from trt_spec.runtime.state.rows import BLOCK, Rows

from ..bundles import DRAFTERS_OF_A_PAIR, Pair
from ..hybrids import Hybrid
from ..kit.headed import Headed
from ..kit.replaying import Machine, replaying
from ..source_models import example_sources

LENGTHS = [9, 26, 17, 30]  # of outputs, for three rows
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
COUPLED = SamplingParams(temperature=1.0, seed=3, rule="coupled", ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, top_p=0.9, ignore_eos=True)
TOKENWISE = replace(SAMPLED, rule="tokenwise", repetition_penalty=1.2, presence_penalty=0.4, top_k=20)
LENIENT = SamplingParams(temperature=1.0, seed=3, lenience=0.6, min_p=0.02, ignore_eos=True)
OWN_DRAFT = replace(SAMPLED, draft_temperature=0.6, logit_bias={7: -torch.inf, 9: 1.0}, min_tokens=4)
SETTINGS = [GREEDY, COUPLED, SAMPLED, TOKENWISE, LENIENT, OWN_DRAFT]
PROMPTS: list[Any] = ["def f(", "abc abc abc abc", "x", "one two one two one"]
Choice = tuple[str, DraftLength]
CHOICES: list[Choice] = [("none", 0), ("model", 2), *((drafter, 4) for drafter in DRAFTERS_OF_A_PAIR if drafter != "none")]
TREES: list[Choice] = [("model", "3+4"), ("random", "2+6"), ("model", "3/9"), ("model", "2x2x1"), ("model+lookup", 3)]


class Said(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    rounds: tuple[tuple[int, ...], ...]  # what each proposed, if it was traced


def said(request: Request) -> Said:
    output = request.output() if request.finish_reason != "cancelled" else None
    logprobs = () if output is None else tuple(one.logprob for one in output.logprobs or ())
    return Said(tuple(request.token_ids), logprobs, tuple(one.proposal for one in request.trace or ()))


def texts(
    bundle: Path,
    choices: Sequence[Choice],
    params: SamplingParams,
    engine: str = "onnxruntime",
    *,
    prompts: Sequence[Any] = PROMPTS,
    lengths: Sequence[int] = LENGTHS,
    cancelled: int | None = None,
    **asked: Any,
) -> list[Said]:
    """Return what is said after these prompts, in three rows; that of the `cancelled` one up to its eighth token."""
    found: list[Said] = []
    with Decoder.open(bundle, engine, max_batch=3) as decoder:
        for drafter, length in choices:
            requests = [
                decoder.submit(
                    prompt,
                    replace(params, max_new_tokens=most),
                    draft_length=length,
                    drafter=drafter,
                    **{name: each[i] if isinstance(each, list) else each for name, each in asked.items()},
                )
                for i, (prompt, most) in enumerate(zip(prompts, lengths, strict=True))
            ]
            while decoder.step():
                if cancelled is not None and len(requests[cancelled].token_ids) > 8:
                    decoder.cancel(requests[cancelled])
            found += [said(request) for request in requests]
    return found


def replayed(bundle: Path, choices: Sequence[Choice], params: SamplingParams, **asked: Any) -> tuple[list[Said], Machine]:
    with replaying() as machine:
        return texts(bundle, choices, params, "torch", **asked), machine


def require_same(bundle: Path, choices: Sequence[Choice], params: SamplingParams, **asked: Any) -> None:
    expected = texts(bundle, choices, params, **asked)
    found, machine = replayed(bundle, choices, params, **asked)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.tokens == theirs.tokens, (choices[i // len(LENGTHS)], i % len(LENGTHS))
        assert ours.rounds == theirs.rounds
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert sum(machine.launched) > 4 * len(choices), "many rounds were replayed"
    assert machine.most_unread >= 2, "some were launched before the one before them was read"


@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "coupled", "sampled", "tokenwise", "lenient", "own draft"])
def test_lines_of_all_drafters_of_a_pair(llama: Pair, params: SamplingParams) -> None:
    require_same(llama.bundle, CHOICES, params)


@pytest.mark.parametrize("params", [GREEDY, COUPLED, SAMPLED, LENIENT], ids=["greedy", "coupled", "sampled", "lenient"])
def test_combs_trees_and_lines_beside_each_other(llama: Pair, params: SamplingParams) -> None:
    require_same(llama.bundle, TREES, params)


@pytest.mark.parametrize("choice", [("model", 3), ("cascade", 4), ("model", "3/9")])
def test_log_probs_and_traces(llama: Pair, choice: Choice) -> None:
    require_same(llama.bundle, [choice], replace(SAMPLED, logprobs=2), trace=True)


def test_lengths_that_follow_the_drafts_entropy(llama: Pair) -> None:
    with replaying() as machine:
        found = texts(llama.bundle, [("model", EntropyRule(longest=4))], COUPLED, "torch")
    assert found == texts(llama.bundle, [("none", 0)], COUPLED)
    assert sum(machine.launched) > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_that_is_cancelled(llama: Pair, params: SamplingParams) -> None:
    choice = [("model", 3)]
    expected = texts(llama.bundle, choice, params)
    found, _ = replayed(llama.bundle, choice, params, cancelled=1)
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.tokens == (theirs.tokens[: len(ours.tokens)] if row == 1 else theirs.tokens)
    assert 8 < len(found[1].tokens) < LENGTHS[1]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("choice", [("model", 4), ("model", "3/9")])
def test_texts_up_to_the_end_of_the_capacity(llama: Pair, choice: Choice, params: SamplingParams) -> None:
    """Where uniforms come from two blocks, and a row writes what lies beyond the longest sequence."""
    prompts, lengths = [[5, 6, 7] * 80, [9, 8] * 30, [4] * 200], [256 - 240, 2 * BLOCK - 60 + 5, 256 - 200]
    require_same(llama.bundle, [choice], params, prompts=prompts, lengths=lengths)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("eagle3", (3, "3/6")),
        ("mtp", (3,)),
        ("peagle", (3,)),
        ("dflash", (3,)),
        ("dspark", (3, "2x2")),
        ("medusa", (3,)),
        ("blockwise", (3,)),
    ],
)
def test_heads(every_kind: dict[str, Headed], name: str, lengths: tuple[int | str, ...]) -> None:
    """They read features that the target has written in the round before."""
    prompts = [[7, 1, 30], [5, 9], [3, 3, 3, 3], [8] * 20]
    for params in (GREEDY, SAMPLED):
        require_same(every_kind[name].bundle, [(name, length) for length in lengths], params, prompts=prompts)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_look_aheads(ahead: Path, params: SamplingParams) -> None:
    prompts = [[7, 1, 30], [5, 9], [3, 3, 3, 3], [8] * 20]
    require_same(ahead, [("pass", 3), ("pass", "2+2")], params, prompts=prompts)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_recurrent_models(hybrids: Callable[[str], Hybrid], params: SamplingParams) -> None:
    """Their states swallow what they have read in the round after it."""
    prompts = [[7, 1, 30], [5, 9], [3, 3, 3, 3], [8] * 20]
    choices: list[Choice] = [("none", 0), ("model", 3), ("lookup", 3), ("model", "3/6"), ("cascade", 3)]
    require_same(hybrids("granitemoehybrid").bundle, choices, params, prompts=prompts)


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_texts_behind_sources(kind: str, request: pytest.FixtureRequest) -> None:
    bundle: Path = request.getfixturevalue(kind)
    choices: list[Choice] = [("model", 3), ("model2", 3), ("lookup", 3), ("model", "3/6")]
    if kind == "whisper":
        choices.remove(("lookup", 3))
    for params in (replace(GREEDY, min_tokens=4), SAMPLED):
        require_same(bundle, choices, params, prompts=[()] * 4, source=example_sources(kind, 4))


def test_searches_with_beams_beside_rounds_that_are_replayed(llama: Pair) -> None:
    def found(engine: str) -> list[tuple[int, ...]]:
        with Decoder.open(llama.bundle, engine, max_batch=3) as decoder:
            searching = decoder.submit("def f(", SamplingParams(num_beams=3, temperature=0, max_new_tokens=12))
            others = [decoder.submit(p, replace(GREEDY, max_new_tokens=20), draft_length=3) for p in PROMPTS[1:]]
            while decoder.step():
                pass
            return [tuple(one.token_ids) for one in (searching, *others)]

    with replaying() as machine:
        ours = found("torch")
    assert ours == found("onnxruntime")
    assert sum(machine.launched) > 4


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_a_draft_with_other_tokens(merging: Pair, params: SamplingParams) -> None:
    """Its proposals come from the host before each round, so that no round is launched ahead."""
    prompts = [[7, 1, 30], [5, 9], [3, 3, 3, 3], [8] * 20]
    choices: list[Choice] = [("common", 3), ("text", 3)]
    expected = texts(merging.bundle, choices, params, prompts=prompts)
    found, machine = replayed(merging.bundle, choices, params, prompts=prompts)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert sum(machine.launched) > 4


# Faults that a GPU would have shown.


def unmade_uniforms(rows: Rows, first: int, count: int, lengths: range, beyond: bool = False) -> None:
    """As it was: none at or beyond a request's longest text, and zeros where none are made."""
    if rows.uniforms.eq(0.5).all():
        rows.uniforms.zero_()
    for row in range(first, first + count):
        made(rows, row, 1, lengths[: LENGTHS[row % 3] // 2], beyond)


made = Rows.fill_uniforms


@pytest.fixture
def fails(llama: Pair) -> Iterator[Callable[..., None]]:
    """Requires that rounds which are replayed fail, or write another text than plain rounds do."""
    params, choice = replace(SAMPLED, top_p=0.6), [("model", 4)]
    expected = [one.tokens for one in texts(llama.bundle, choice, params)]

    def require_failure(*errors: type[Exception], match: str | None = None) -> None:
        try:
            found, _ = replayed(llama.bundle, choice, params)
        except errors as error:
            assert match is None or match in str(error)
        else:
            assert [one.tokens for one in found] != expected

    require_none = texts
    assert require_none is texts
    yield require_failure


def test_columns_that_are_freed_are_noticed(fails: Callable[..., None]) -> None:
    """A column that is made anew leaves what the record reads to nobody."""
    launch = Rounds.launch

    def freed(self: Rounds, rows: Rows, *arguments: Any) -> Any:
        rows.columns["temperature"] = rows.columns["temperature"].clone()
        return launch(self, rows, *arguments)

    with patch.object(Rounds, "launch", freed):
        fails(AssertionError, match="memory of")
