"""A model of the bundle in an engine of its own: what the loop is compared with, whatever rounds have done."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from threading import Lock
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ...engines import ENGINES, Engine, Step, engines_of, open_engine
from ...engines.bundle import TARGET
from ...runtime.memory.adapter_files import read_adapter
from ...runtime.memory.adapter_pool import AdapterPool, rooms_of
from ...runtime.memory.features import Features
from ...runtime.memory.model import Model
from ...runtime.memory.tokens import Absorbs, Tokens
from ...runtime.sources.encoder import Encoder, Wanted
from ...runtime.sources.source import read_source
from ..example_sources import example_source
from .subject import Subject

NEVER = -1e9  # a logit whose token is not said, and that can be subtracted from itself


def _seated(subject: Subject, engine: Engine) -> AdapterPool | None:
    """Return the memory of the subject's adapter, which every row has."""
    rooms = rooms_of(subject.bundle)
    if subject.adapter is None or not rooms:
        return None
    pool = AdapterPool(rooms, engine, subject.batch)
    adapter = pool.load("", subject.adapter, read_adapter(subject.adapter, pool.room, pool.dtype))
    for row in range(subject.batch):
        pool.seat(row, adapter)
    return pool


class Probe:
    """Fresh prefills and single steps, in any shape that the engine runs; any thread may ask for them.

    That of a head has the `target` read what the head is to read.
    """

    model: Model

    def __init__(self, subject: Subject, role: str = "target", target: "Probe | None" = None) -> None:
        bundle = subject.bundle
        contract = bundle.models[role].contract
        engine = engines_of(subject.engine)[role != TARGET]
        self.engine = open_engine(engine, bundle.graph(role), contract, subject.device)
        adapters = _seated(subject, self.engine) if role == TARGET else None
        self._adapter = None if adapters is None else adapters.named("")
        self._target = target
        features = None if target is None else Features(target.model.cache, bundle.features(role))
        self.model = Model(
            self.engine,
            bundle.vocab_size(role),
            subject.batch,
            bundle.capacity_of(role),
            features=features,
            longest_source=bundle.longest_source(role),
            adapters=adapters,
        )
        self._bundle, self._lock = bundle, Lock()
        self._unsaid = torch.tensor(bundle.tokenizer.unsaid_ids, dtype=torch.int64)
        self._encoders = {
            name: Encoder(
                open_engine(ENGINES[engine].encodes_in, bundle.graph(name), one.contract, subject.device),
                one.contract,
                {role: self.model},
                most_bytes=0,
                adapters=adapters,
            )
            for name, one in bundle.encoders.items()
            if role in one.contract.feeds
        }

    @torch.inference_mode()
    def logits(self, context: Sequence[int], width: int = 1, batch: int = 1, decoded: int = 0) -> Tensor:
        """Return those [V] after `context`, in each of `batch` equal rows.

        The last `decoded` tokens or so, at least `width`, are read in steps of that width, all before as a prompt is.
        """
        tokens = torch.tensor(context, device=self.engine.device)
        begin = len(context) - width * max(1, decoded // width)
        with self._lock, nullcontext() if self._target is None else self._target._lock:
            if self._target is not None:
                self._target._read(tokens, batch)
            self._read(tokens, batch, begin)
            self.model.cache.make_room(0, [0] * batch, [len(context)] * batch)  # after the reading, which may shrink it
            step = fresh_step(self.model, 0, batch, width)
            for start in range(begin, len(context), width):
                step.input_ids.copy_(tokens[start : start + width])
                step.start.fill_(start)
                step.run()
            return step.logits[0, -1, : self.model.vocab_size].cpu()

    def distribution(self, context: Sequence[int], width: int = 1, batch: int = 1, decoded: int = 0) -> Tensor:
        """Return the scores by which requests are answered: what the bundle says shall never be said is not."""
        return self.logits(context, width, batch, decoded).index_fill(0, self._unsaid, NEVER)

    def _read(self, tokens: Tensor, batch: int, end: int | None = None) -> None:
        """Begin anew, with the first tokens in each row, and the source that the first of all stands for."""
        self.model.cache.clear()
        for name, encoder in self._encoders.items():
            source = example_source(self._bundle, int(tokens[0]))
            read = read_source(source, [self._bundle.encoders[name].contract], self._bundle.tokenizer.vocab_size)
            encoder.read(dict.fromkeys(range(batch), Wanted(read.digest, read, self._adapter)))
        tokens = tokens[:end]
        keeps = bool(self.engine.contract.kept)  # else there is nothing to read for
        for row in range(batch if keeps and len(tokens) else 0):
            self.model.prefill([row], [tokens])

    def close(self) -> None:
        self.model.close()
        for encoder in self._encoders.values():
            encoder.close()


def fresh_step(model: Model, first_row: int, batch: int, width: int, *, goes_on: bool = False) -> Step:
    """Make a step of a model on new tensors, all zero, which gives logits for all of its tokens.

    A recurrent model absorbs all before it, unless it `goes_on` and leaves the rows as they are.
    """
    cache = model.cache
    cache.make_slots(width)
    since = max(width, *(cache.since(row) for row in range(first_row, first_row + batch)))
    if goes_on and cache.recurrence is not None:
        cache.recurrence.resume(first_row, batch)
    device = model.engine.device
    ids, start = torch.zeros(batch, width, dtype=torch.int64, device=device), torch.zeros(batch, dtype=torch.int64)
    logits = torch.zeros(batch, width, model.engine.contract.vocab_size, device=device)
    tokens = Tokens(ids, start.to(device), first_row)
    return model.step(tokens, logits, absorbs=Absorbs(since, goes_on=goes_on))


class Probes(Mapping[str, Probe]):
    """One for each model of the bundle, opened on first use and shared by all checks."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._open: dict[str, Probe] = {}

    def __getitem__(self, role: str) -> Probe:
        if role not in self._open:
            target = self[TARGET] if role in self.subject.bundle.heads else None
            self._open[role] = Probe(self.subject, role, target)
        return self._open[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self.subject.bundle.models)

    def __len__(self) -> int:
        return len(self.subject.bundle.models)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for probe in self._open.values():
            probe.close()
