"""Opens all graphs of a bundle in their engines, on their devices."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch

from ...engines import (
    ENGINES,
    ROW,
    Bundle,
    BundleError,
    EncoderEntry,
    Engine,
    EngineError,
    ModelEntry,
    RequestError,
    VisionEntry,
    devices_of,
    engines_of,
    open_engines,
    refuse_weights,
)
from ...engines.bundle import VISION
from ...engines.errors import counted, first_line


class Engines(NamedTuple):
    """An engine for each graph of a bundle."""

    models: Sequence[Engine]  # of the target, its drafts and heads, and a draft with tokens of its own
    encoders: Mapping[str, Engine]
    eyes: Engine | None  # of the graph that sees for the target


def open_graphs(bundle: Bundle, engine: str, devices: Sequence[str], opened: ExitStack) -> Engines:
    """Open all graphs of a bundle; what is `opened` is closed with that stack.

    What encodes is opened by itself: it runs between rounds, so that models share no cores with it. A bundle that was
    replaced since it was read is refused.
    """
    _refuse_drafts(bundle)
    target, drafts = engines_of(engine)
    names = [*bundle.names, *([bundle.foreign] if bundle.foreign else [])]
    models = {name: bundle.models[name] for name in names}
    eyes = {} if bundle.vision is None else {VISION: bundle.vision}

    def engines(kinds: Sequence[str], entries: Mapping[str, ModelEntry | EncoderEntry | VisionEntry]) -> list[Engine]:
        for kind, (name, entry) in zip(kinds, entries.items(), strict=True):
            refuse_weights(kind, name, entry.weights)
        graphs = [(bundle.graph(name), entry.contract) for name, entry in entries.items()]
        some = open_engines(kinds, graphs, devices[0], devices=devices)
        for one in some:
            opened.callback(one.close)
        return some

    of_models = engines([target, *[drafts] * (len(names) - 1)], models)
    encodes = ENGINES[target].encodes_in
    of_encoders = engines([encodes] * len(bundle.encoders), bundle.encoders)
    of_eyes = engines([ENGINES[target].sees_in or encodes] * len(eyes), eyes)
    bundle.require_same()
    return Engines(of_models, dict(zip(bundle.encoders, of_encoders, strict=True)), of_eyes[0] if of_eyes else None)


def devices_for(bundle: Bundle, device: str, devices: Sequence[str] | None) -> Sequence[str]:
    """Return a device for each shard of the target: those that are given, or the first of a kind."""
    shards = bundle.target.contract.shards
    if devices is None:
        return devices_of(device, shards)
    if len(devices) != shards:
        raise RequestError(
            f"the target of bundle {bundle.path} is in {counted(shards, 'shard')}, got "
            f"{counted(len(devices), 'device')}; name one for each"
        )
    return devices


def own_stream(device: str) -> AbstractContextManager[None]:
    """Make a stream of our own on a GPU, because nothing can be captured on the default stream."""
    if not device.startswith("cuda"):
        return nullcontext()
    try:
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except (RuntimeError, AssertionError) as error:
        raise EngineError(
            f"device {device!r} cannot be used ({first_line(error)}); expected cpu or cuda; trt-spec doctor says more"
        ) from error


def _refuse_drafts(bundle: Bundle) -> None:
    """Refuse drafts with states of rows that no call says what to absorb: proposals may be rejected after all."""
    for name in (*bundle.drafts, *filter(None, [bundle.foreign])):
        if bundle.models[name].contract.recurrent and name != bundle.foreign:
            continue
        for state in bundle.models[name].contract.of_kind(ROW):
            raise BundleError(
                f"bundle {bundle.path} has the {name} with {state}, which could not be taken back where a proposal is "
                "rejected; expected drafts with states per token alone, export another"
            )
