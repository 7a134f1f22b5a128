"""A model of the bundle in an engine of its own: what the loop is compared with, whatever rounds have done."""

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ...engines import blank_step, engines_of, open_engine
from ...engines.bundle import TARGET
from ...runtime.memory.model import Model
from .subject import Subject


class Probe:
    """Fresh prefills and single steps, in any shape that the engine runs; any thread may ask for them."""

    def __init__(self, subject: Subject, role: str = "target") -> None:
        bundle = subject.bundle
        contract = bundle.models[role].contract
        engine = engines_of(subject.engine)[role != TARGET]
        self.engine = open_engine(engine, bundle.graph(role), contract, subject.device)
        self.model = Model(self.engine, bundle.tokenizer.vocab_size, subject.batch, bundle.capacity)
        self._lock = Lock()

    @torch.inference_mode()
    def logits(self, context: Sequence[int], width: int = 1, batch: int = 1, decoded: int = 0) -> Tensor:
        """Those [V] after `context`, in each of `batch` equal rows: about the last `decoded` tokens, at least `width`,
        are read in steps of that width, and all before them as a prompt is."""
        tokens = torch.tensor(context, device=self.engine.device)
        begin = len(context) - width * max(1, decoded // width)
        with self._lock:
            cache = self.model.cache
            cache.clear()
            for row in range(batch if begin else 0):
                self.model.prefill([row], [tokens[:begin]])
            cache.make_room(0, [0] * batch, [len(context)] * batch)  # after the reading, which may shrink it
            step = blank_step(self.engine, cache.everything, 0, batch, width, width)
            for start in range(begin, len(context), width):
                step.input_ids.copy_(tokens[start : start + width])
                step.start.fill_(start)
                step.run()
            return step.logits[0, -1, : self.model.vocab_size].cpu()

    def close(self) -> None:
        self.model.close()


class Probes(Mapping[str, Probe]):
    """One for each model of the bundle, opened on first use and shared by all checks."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._open: dict[str, Probe] = {}

    def __getitem__(self, role: str) -> Probe:
        if role not in self._open:
            self._open[role] = Probe(self.subject, role)
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
