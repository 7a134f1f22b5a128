"""A target that computes what comes after a context once, and recalls it wherever requests meet that context again.

The first tokens of many samples meet few contexts. This engine replaces the target's, under the real loop:
its cache holds the tokens themselves in the place of keys and values, so that rows move, roll back and branch there as
they do in the target's, and a wrong entry makes a wrong context. After a context that counts it says what the target's
own engine has computed. After longer ones all tokens are alike: what is drawn there is cut off, and how likely an
earlier token is to be accepted does not depend on it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import compress

import torch
from torch import Tensor

from ...engines import Engine, Step, keys_and_values
from ...runtime import Decoder
from ...runtime.memory.model import Model
from ...runtime.scheduling.opening import Engines
from ..example_sources import SourcedDecoder
from .first_tokens import DEPTH, Tokens

REMEMBERED_BYTES = 2**28  # of logits, in each lane
LONGEST = DEPTH  # tokens of a context that counts: those of a request, with its prompt of one, but for the last
MISPLACED = (-1,) * (LONGEST + 1)  # stands for the context of a token that is not at the end of what it sees
AT_ONCE = 64  # contexts that are computed together


class RecallingDecoder(SourcedDecoder):
    """A decoder whose target recalls; not on a GPU, where to read tokens is to wait, nor in engines without trees.

    Nor does a target that keeps more than tokens tell, for heads or of a source.
    """

    def _open_graphs(self, devices: Sequence[str], opened: ExitStack) -> Engines:
        engines = super()._open_graphs(devices, opened)
        target, *others = engines.models
        if devices[0] != "cpu" or not target.takes_trees or self.bundle.heads or self.bundle.encoders:
            return engines
        return engines._replace(models=[RecallingEngine(target, self.bundle.capacity), *others])


def recalls(decoder: Decoder) -> bool:
    return isinstance(decoder.target.engine, RecallingEngine)


class RecallingEngine(Engine):
    """Runs in the place of the target's engine, which it owns."""

    def __init__(self, engine: Engine, capacity: int) -> None:
        contract = engine.contract
        tokens = keys_and_values(1, 1, 1, "float32")
        self.contract = replace(contract, layers=1, heads=1, states=tokens, dtype="float32")
        self.device, self.own_threads, self.verify_width = engine.device, engine.own_threads, engine.verify_width
        self.takes_trees, self.reads_together = engine.takes_trees, engine.reads_together
        self._at_once = AT_ONCE if engine.reads_together else 1
        self._model = Model(engine, contract.vocab_size, self._at_once, capacity)
        self._uniform = torch.zeros(contract.vocab_size)
        self._known: dict[Tokens, Tensor] = {}
        self._most = REMEMBERED_BYTES // (4 * contract.vocab_size)

    def prefill_widths(self, tokens: int) -> list[int]:
        return self._model.engine.prefill_widths(tokens)

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        ids, start = inputs["input_ids"], inputs["start"]
        cache = inputs["past_key_0"][:, 0, :, 0]  # [B, T], the tokens
        places = torch.arange(ids.shape[1])
        logits = outputs["logits"].flatten(0, 1)  # [B · R, V]

        def run() -> None:
            cache.scatter_(1, start[:, None] + places, ids.float())
            self._recall([*_contexts(cache, inputs)], logits)

        return Step(inputs, outputs, run)

    def _recall(self, contexts: Sequence[Tokens], logits: Tensor) -> None:
        """Write the logits [N, V] after each context."""
        unknown = [one for one in dict.fromkeys(contexts) if len(one) <= LONGEST and one not in self._known]
        for begin in range(0, len(unknown), self._at_once):
            some = unknown[begin : begin + self._at_once]
            self._model.cache.clear()
            computed = self._model.prefill(range(len(some)), [torch.tensor(context) for context in some])
            self._known |= zip(some, computed[:, 0].clone(), strict=True)
        torch.stack([self._known.get(context, self._uniform) for context in contexts], out=logits)
        if len(self._known) > self._most:
            self._known.clear()

    def close(self) -> None:
        self._model.close()


def _contexts(cache: Tensor, inputs: Mapping[str, Tensor]) -> Iterator[Tokens]:
    """Return what each token that gives logits sees: its row's entries, and its ancestors in this step, with itself."""
    start, *others = (inputs[name] for name in ("start", "input_ids", "depths", "ancestors", "logit_rows"))
    before = cache[:, : int(start.max())].long()
    each = (one.tolist() for one in (before, start, *others))
    for entries, length, tokens, depths, ancestors, nodes in zip(*each, strict=True):
        for node in nodes:
            path = (*entries[:length], *compress(tokens, ancestors[node]))
            yield path if len(path) == length + depths[node] + 1 else MISPLACED
