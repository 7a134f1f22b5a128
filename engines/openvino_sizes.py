"""OpenVINO models that are compiled for one number of tokens each.

A model for any number looks at each of its nodes before every call, which is a tenth of a step of 80 million parameters
in int8 and a quarter of a small draft's. A model for one number does not, and computes the same bits. But it holds the
weights once more. So only the numbers that calls often have get one, and it is compiled while calls go on without it.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

ENOUGH_CALLS = 256  # of one number of tokens, to be worth a model by and by
SOME_CALLS = 2  # to be worth one at once
MOST_BYTES = 1 << 30  # that the weights of all these models take
MOST_MODELS = 16
FINE, STEP = 8, 4  # numbers above the first are rounded up to a multiple of the second


@dataclass
class Compiled:
    """A compiled model, and the calls of it that are kept, by their shapes."""

    model: Any
    tokens: int = 0  # 0: any number
    calls: dict[tuple[int, ...], Any] = field(default_factory=dict)


class FixedSizes:
    """Counts how many tokens calls have, compiles models for the most frequent numbers, and finds them again."""

    def __init__(self, model: Any, compile_model: Callable[[Any], Any]) -> None:
        weights = sum(node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant")
        most = min(MOST_MODELS, MOST_BYTES // weights)
        self._most = most if most > 1 else 0  # where reading the weights takes far longer than looking at nodes
        self._model: Any = model if self._most else None
        self._compile = compile_model
        self._compiler = ThreadPoolExecutor(1, "openvino-sizes")  # starts no thread before it has work
        self._models: dict[int, Future[Compiled]] = {}
        self._calls: Counter[int] = Counter()  # by the number that would fit them best

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens that have a model."""
        return sorted(size for size, found in self._models.items() if found.done())

    def find(self, tokens: int) -> Compiled | None:
        """Count a call of so many tokens; return the model to run it in, if there is one, of as many or a few more."""
        if not self._most:
            return None
        best = tokens if tokens <= FINE else -(-tokens // STEP) * STEP
        self._calls[best] += 1
        if self._calls[best] >= ENOUGH_CALLS:
            self._add(best)
        for size in range(tokens, tokens + STEP):
            if (found := self._models.get(size)) is not None and found.done():
                return found.result()
        return None

    def settle(self) -> None:
        """Compile at once for the numbers that calls have had most often."""
        for size, calls in self._calls.most_common(self._most):
            if calls >= SOME_CALLS:
                self._add(size)
        for found in self._models.values():
            found.result()

    def forget_calls(self) -> None:
        for found in self._models.values():
            if found.done():
                found.result().calls.clear()

    def close(self) -> None:
        """Free all models, and make no more."""
        self._most = 0
        self._compiler.shutdown(cancel_futures=True)
        self._models.clear()

    def _add(self, size: int) -> None:
        if size not in self._models and self._has_room(size):
            self._models[size] = self._compiler.submit(self._compiled, size)

    def _has_room(self, size: int) -> bool:
        """Let the model that is used least give way to one that would be used twice as often."""
        if len(self._models) < self._most:
            return True
        least = min(self._models, key=self._calls.__getitem__)
        if self._models[least].done() and 2 * self._calls[least] < self._calls[size]:
            del self._models[least]
            return True
        self._calls = Counter({each: count // 2 for each, count in self._calls.items()})  # what was long ago fades
        return False

    def _compiled(self, tokens: int) -> Compiled:
        model = self._model.clone()
        model.reshape({"input_ids": [tokens, 1], "start": [tokens]})
        return Compiled(self._compile(model), tokens)
