"""The target in its engine against the checkpoint it was exported from, run by transformers in float32."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engines import FEATURES, RequestError
from ...runtime import SamplingParams
from ...runtime.sources.source import read_source
from ..example_sources import example_source
from .arbiter import Arbiter
from .effort import Effort
from .probe import Probes
from .same_text import PlainAnswer, Tally, ask_plain
from .subject import Finding, Progress, Subject

STRIDE = 8  # positions of a text between two whose logits are compared


def load(subject: Subject, directory: Path) -> Any:
    """The model, in the bundle's dtype; another one than the bundle's target is refused."""
    if find_spec("transformers") is None:
        raise RequestError("--checkpoint needs transformers, which is not installed; pip install 'trt-spec[export]'")
    from ...export.checkpoints.checkpoint import load_model, open_checkpoint
    from ...export.writing.quiet import quiet_libraries

    with quiet_libraries():
        checkpoint = open_checkpoint(directory, subject.adapter)
    promised = subject.bundle.target.contract.without_adapters
    promised = replace(promised, states=tuple(one for one in promised.states if one.name != FEATURES))  # the heads'
    found = checkpoint.shape.contract(promised.max_length, promised.dtype)
    if found != promised:
        differing = [
            f"{name} {value} instead of {asdict(promised)[name]}"
            for name, value in asdict(found).items()
            if value != asdict(promised)[name]
        ]
        raise RequestError(
            f"checkpoint {directory} is not the one {subject.bundle.path} was exported from: it has "
            f"{', '.join(differing)}; name that of {subject.bundle.target.name}"
        )
    with quiet_libraries():
        return load_model(checkpoint, promised.dtype)


def check(subject: Subject, directory: Path, probes: Probes, effort: Effort, progress: Progress) -> Iterator[Finding]:
    from ...export.checking.oracle import branch_logits, computing_in_float32

    progress("checkpoint: loading", 0, 3)
    model = load(subject, directory)
    vocab_size = subject.bundle.tokenizer.vocab_size
    if (kind := subject.bundle.target.weights) != "none":
        # What the loop must equal is the model as stored; the export has compared that with the rounded checkpoint.
        yield Finding("checkpoint", directory.name, None, f"not judged: the bundle's weights are {kind}")
        return
    progress("checkpoint: greedy text", 1, 3)
    params = SamplingParams(max_new_tokens=subject.room(effort.new_tokens))
    asked = ask_plain(subject, [(prompt, params) for prompt in subject.prompts(effort.prompts)])
    probe = probes["target"]

    def logits(text: Sequence[int]) -> Tensor:
        with _given_its_source(subject, model, text[0]):
            return branch_logits(model, [[*text]])[0][:, :vocab_size]

    judge = Arbiter(probe, subject.rounding, [lambda context: logits(context)[-1]])
    tally = Tally()
    with computing_in_float32(model):
        for one in asked:
            tally.add_tokens(one, transformers_text(subject, model, one), judge, "transformers")
    yield tally.finding("checkpoint", "greedy text of transformers")
    progress("checkpoint: logits", 2, 3)
    worst, compared = 0.0, 0
    for one in asked:
        text = [*one.prompt, *one.expected.token_ids]
        expected = logits(text)
        for length in range(1, len(text) + 1, STRIDE):
            worst = max(worst, float(torch.dist(probe.logits(text[:length]), expected[length - 1], torch.inf)))
            compared += 1
    allowed = subject.rounding * max(1.0, float(expected.std()))
    detail = f"{compared} positions, within {worst:.2g} of transformers (allowed {allowed:.2g})"
    yield Finding("checkpoint", "logits", worst <= allowed, detail, {"worst": worst, "allowed": allowed})


def transformers_text(subject: Subject, model: Any, one: PlainAnswer) -> list[int]:
    """Return what its `generate` says, end of text included."""
    ids = torch.tensor([one.prompt])
    with _given_its_source(subject, model, one.prompt[0]):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=one.params.max_new_tokens,
            eos_token_id=list(subject.bundle.tokenizer.eos_token_ids) or None,
            pad_token_id=0,
            repetition_penalty=1.0,
        )
    text: list[int] = output[0, len(one.prompt) :].tolist()
    return text


def _given_its_source(subject: Subject, model: Any, first_token: int) -> AbstractContextManager[None]:
    """Let a model that needs a source have the one of the texts that begin with this token."""
    source = example_source(subject.bundle, first_token)
    if source is None:
        return nullcontext()
    encoder = subject.bundle.encoder
    assert encoder is not None
    read = read_source(source, [encoder.contract], subject.bundle.tokenizer.vocab_size)
    sound = encoder.contract.sound
    given = {"input_features": read.pictures[sound][None]} if sound else {"input_ids": torch.tensor([read.ids])}
    given_source: AbstractContextManager[None] = model.given(model.hears(given))
    return given_source
