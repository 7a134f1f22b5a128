"""OpenVINO models that are compiled for one number of tokens each.

A model for any number prepares each of its nodes before every call, which takes a tenth of a step of 80 million
parameters in int8 and a quarter of a small draft's. A model for one number does not, and computes the same bits. But it
holds the weights once more. So only the numbers that calls often have get a model, compiled while calls go on.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

ENOUGH_CALLS = 256  # after which a number of tokens gets a model in the background
SOME_CALLS = 2  # after which it gets one when the engine settles
MOST_BYTES = 1 << 30  # that the weights of all these models take
MOST_MODELS = 16
MOST_TOKENS = 64  # a call of more gains little
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
        self._most = most if most > 1 else 0  # a larger model gains little: reading its weights takes far longer
        self._model: Any = model if self._most else None
        self._compile = compile_model
        self._compiler = ThreadPoolExecutor(1, "openvino-sizes")  # starts no thread before it has work
        self._models: dict[int, Future[Compiled]] = {}
        self._calls: Counter[int] = Counter()  # by the number that would fit them best

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens that have a model."""
        return sorted(size for size in self._models if self._ready(size))

    def find(self, tokens: int) -> Compiled | None:
        """Count a call of so many tokens; return the model to run it in, if there is one, of as many or a few more."""
        if not self._most or tokens > MOST_TOKENS:
            return None
        best = tokens if tokens <= FINE else -(-tokens // STEP) * STEP
        self._calls[best] += 1
        if self._calls[best] >= ENOUGH_CALLS and best not in self._models and not self._add(best):
            self._calls = Counter(
                {size: calls // 2 for size, calls in self._calls.items()}
            )  # old calls count less and less
        # A single token is never padded: with some weights it has a kernel of its own, and its bits must not depend on
        # which models are ready.
        for size in range(tokens, tokens + STEP if tokens > 1 else 2):
            if found := self._ready(size):
                return found
        return None

    def settle(self) -> None:
        """Compile at once for the numbers that calls have had most often."""
        for size, calls in self._calls.most_common(self._most):
            if calls >= SOME_CALLS and size not in self._models:
                self._add(size)
        for found in self._models.values():
            found.exception()  # waits

    def forget_calls(self) -> None:
        for size in self.sizes:
            self._models[size].result().calls.clear()

    def give_up(self) -> None:
        """Free all models, and make no more."""
        self._most, self._model = 0, None
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._models.clear()

    def close(self) -> None:
        self.give_up()
        self._compiler.shutdown()

    def _ready(self, size: int) -> Compiled | None:
        """Return the model for so many tokens; one that could not be compiled, for lack of memory, is never ready."""
        found = self._models.get(size)
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def _add(self, size: int) -> bool:
        """Compile for this number, if need be in place of the one used least, where that is used half as often."""
        if len(self._models) >= self._most:
            least = min(self._models, key=self._calls.__getitem__)
            if not self._models[least].done() or 2 * self._calls[least] >= self._calls[size]:
                return False
            del self._models[least]
        self._models[size] = self._compiler.submit(self._compiled, self._model, size)
        return True

    def _compiled(self, model: Any, tokens: int) -> Compiled:
        fixed = model.clone()
        fixed.reshape({"input_ids": [tokens, 1], "start": [tokens]})
        return Compiled(self._compile(fixed), tokens)
