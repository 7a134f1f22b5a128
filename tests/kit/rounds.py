"""Rounds of every kind, as scenes: what is asked of which bundle, in three rows that end at unlike lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder, EntropyRule, Grammar, Request, SamplingParams
from trt_spec.runtime.state.asked import DraftLength

from .bundles import DRAFTERS_OF_A_PAIR
from .source_models import example_sources

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
COUPLED = SamplingParams(temperature=1.0, seed=3, rule="coupled", ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, top_p=0.9, ignore_eos=True)
TOKENWISE = replace(SAMPLED, rule="tokenwise", repetition_penalty=1.2, presence_penalty=0.4, top_k=20)
LENIENT = SamplingParams(temperature=1.0, seed=3, lenience=0.6, min_p=0.02, ignore_eos=True)
OWN_DRAFT = replace(SAMPLED, draft_temperature=0.6, logit_bias={7: -torch.inf, 9: 1.0}, min_tokens=4)
REPORTED = replace(SAMPLED, logprobs=2)
GUIDED = replace(COUPLED, grammar=Grammar.choice(["alpha beta", "alpha 20", "gamma"]), ignore_eos=False)

TEXTS = ["def f(", "abc abc abc abc", "x", "one two one two one"]
NUMBERS = [[7, 1, 30], [5, 9], [3, 3, 3, 3], [8] * 20]
LENGTHS = [9, 26, 17, 30]  # of outputs
TO_THE_END = [[5, 6, 7] * 80, [9, 8] * 30, [4] * 200, [7, 1, 30]], [16, 90, 56, 20]  # of a capacity of 256 tokens

Choice = tuple[str, DraftLength]
LINES: list[Choice] = [("none", 0), ("model", 2), *((name, 4) for name in DRAFTERS_OF_A_PAIR if name != "none")]
TREES: list[Choice] = [("model", "3+4"), ("random", "2+6"), ("model", "3/9"), ("model", "2x2x1"), ("model+lookup", 3)]


@dataclass(frozen=True)
class Scene:
    bundle: Callable[[pytest.FixtureRequest], Path]
    choices: Sequence[Choice]
    params: SamplingParams
    prompts: Sequence[Any] = field(default_factory=lambda: NUMBERS)
    lengths: Sequence[int] = field(default_factory=lambda: LENGTHS)
    sources: str | None = None  # of the kind that its models stand behind
    traced: bool = False
    kernels: bool = True  # of a GPU, which need no buckets; here torch's operations stand for them
    plain: str = "onnxruntime"  # the engine of plain rounds
    recorded: bool = True  # most of its rounds
    ahead: bool = True  # some of them are launched before the one before them was read


class Said(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    proposals: tuple[tuple[int, ...], ...]  # of each round, if it was traced


def texts(
    scene: Scene,
    bundle: Path | Bundle,
    engine: str | None = None,
    device: str = "cpu",
    *,
    cancelled: int | None = None,
    **options: Any,
) -> list[Said]:
    """Return what is said after the prompts of a scene; that of the `cancelled` one up to its ninth token."""
    found: list[Said] = []
    sources = [None] * len(scene.prompts)
    if scene.sources is not None:
        sources = example_sources(scene.sources, len(scene.prompts))
    with Decoder.open(bundle, engine or scene.plain, device, max_batch=3, **options) as decoder:
        for drafter, length in scene.choices:
            requests = [
                decoder.submit(
                    prompt,
                    replace(scene.params, max_new_tokens=most),
                    draft_length=length,
                    drafter=drafter,
                    trace=scene.traced,
                    source=source,
                )
                for prompt, most, source in zip(scene.prompts, scene.lengths, sources, strict=True)
            ]
            while decoder.step():
                if cancelled is not None and len(requests[cancelled].token_ids) > 8:
                    decoder.cancel(requests[cancelled])
            found += [_said(request) for request in requests]
    return found


def _said(request: Request) -> Said:
    output = None if request.finish_reason == "cancelled" else request.output()
    logprobs = () if output is None else tuple(one.logprob for one in output.logprobs or ())
    return Said(tuple(request.token_ids), logprobs, tuple(one.proposal for one in request.trace or ()))


def require_same(found: Sequence[Said], expected: Sequence[Said], scene: Scene) -> None:
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        which = scene.choices[i // len(scene.prompts)], f"request {i % len(scene.prompts)}"
        assert ours.tokens == theirs.tokens, which
        assert ours.proposals == theirs.proposals, which
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4), which


def _of(name: str) -> Callable[[pytest.FixtureRequest], Path]:
    """The bundle of a fixture that is one, or has one."""

    def bundle(request: pytest.FixtureRequest) -> Path:
        found = request.getfixturevalue(name)
        path: Path = found if isinstance(found, Path) else found.bundle
        return path

    return bundle


def _head(name: str) -> Callable[[pytest.FixtureRequest], Path]:
    return lambda request: request.getfixturevalue("every_kind")[name].bundle


def _hybrid(kind: str) -> Callable[[pytest.FixtureRequest], Path]:
    return lambda request: request.getfixturevalue("hybrids")(kind).bundle


def _pair(family: str) -> Callable[[pytest.FixtureRequest], Path]:
    return lambda request: request.getfixturevalue("pairs")(family).bundle


def _weights(kind: str) -> Callable[[pytest.FixtureRequest], Path]:
    return lambda request: request.getfixturevalue("in_few_bits")(kind)


LLAMA = _of("llama")
BEHIND: list[Choice] = [("model2", 3), ("lookup", 3), ("model", "3/6")]
RECURRENT: list[Choice] = [("none", 0), ("lookup", 3), ("model", "3/6"), ("cascade", 3)]

SCENES = {
    "sampled lines": Scene(LLAMA, LINES, SAMPLED, TEXTS, kernels=False),
    "sampled trees": Scene(LLAMA, TREES, SAMPLED, TEXTS, kernels=False),
    "greedy lines": Scene(LLAMA, LINES, GREEDY, TEXTS),
    "greedy trees": Scene(LLAMA, TREES, GREEDY, TEXTS),
    "coupled lines": Scene(LLAMA, LINES, COUPLED, TEXTS),
    "coupled trees": Scene(LLAMA, TREES, COUPLED, TEXTS),
    "tokenwise lines": Scene(LLAMA, LINES, TOKENWISE, TEXTS),
    "lenient lines": Scene(LLAMA, LINES, LENIENT, TEXTS),
    "lenient trees": Scene(LLAMA, TREES, LENIENT, TEXTS),
    "a draft that is cooler": Scene(LLAMA, LINES, OWN_DRAFT, TEXTS),
    "log-probs and traces": Scene(
        LLAMA, [("model", 3), ("cascade", 4), ("model", "3/9")], REPORTED, TEXTS, traced=True
    ),
    "the draft's entropy": Scene(LLAMA, [("model", EntropyRule(longest=4))], COUPLED, TEXTS, ahead=False),
    "a grammar": Scene(LLAMA, [("model", 3), ("none", 0)], GUIDED, TEXTS, recorded=False, ahead=False),
    "greedy to the end": Scene(LLAMA, [("model", 4), ("model", "3/9")], GREEDY, *TO_THE_END, kernels=False),
    "sampled to the end": Scene(LLAMA, [("model", 4), ("model", "3/9")], SAMPLED, *TO_THE_END, kernels=False),
    "soft-caps and windows": Scene(_pair("gemma2"), [("model", 3), ("model", "3/6")], SAMPLED),
    "learned positions": Scene(_pair("gpt2"), [("model", 3), ("model", "3/6")], SAMPLED),
    "latents": Scene(_of("latents"), [("model", 3), ("model", "3/6")], SAMPLED),
    "int8 weights": Scene(
        _weights("int8"), [("none", 0), ("model", 2)], SAMPLED, plain="torch"
    ),  # ONNX Runtime rounds activations
    "int4 weights": Scene(_weights("int4"), [("none", 0), ("model", 2)], SAMPLED, plain="torch"),
    "eagle3": Scene(_head("eagle3"), [("eagle3", 3), ("eagle3", "3/6")], SAMPLED),
    "mtp": Scene(_head("mtp"), [("mtp", 3)], SAMPLED),
    "peagle": Scene(_head("peagle"), [("peagle", 3)], SAMPLED),
    "dflash": Scene(_head("dflash"), [("dflash", 3)], SAMPLED),
    "dspark": Scene(_head("dspark"), [("dspark", 3), ("dspark", "2x2")], SAMPLED),
    "medusa": Scene(_head("medusa"), [("medusa", 3)], SAMPLED),
    "blockwise": Scene(_head("blockwise"), [("blockwise", 3)], SAMPLED),
    "greedy look-aheads": Scene(_of("ahead"), [("pass", 3), ("pass", "2+2")], GREEDY),
    "sampled look-aheads": Scene(_of("ahead"), [("pass", 3), ("pass", "2+2")], SAMPLED),
    "greedy recurrent models": Scene(_hybrid("granitemoehybrid"), RECURRENT, GREEDY),
    "sampled recurrent models": Scene(_hybrid("granitemoehybrid"), [("model", 3)], SAMPLED),
    "behind a text": Scene(_of("t5"), BEHIND, SAMPLED, [()] * 4, sources="t5"),
    "behind sound": Scene(_of("whisper"), [("model", 3), ("model2", 3)], SAMPLED, [()] * 4, sources="whisper"),
    "other tokens": Scene(_of("merging"), [("common", 3), ("text", 3)], COUPLED, ahead=False),
}
OF_ALL_RUNS = (  # the others run in the long tier
    "sampled lines",
    "sampled trees",
    "sampled to the end",
    "log-probs and traces",
    "eagle3",
    "sampled look-aheads",
    "sampled recurrent models",
)
