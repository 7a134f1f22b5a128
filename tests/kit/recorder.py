"""What stands for CUDA graphs where there is no GPU."""

from collections.abc import Callable

from torch import Tensor
from trt_spec.runtime.state.clock import Clock


class Recorder:
    """In place of CUDA: a record runs its work again, whole, as a replay would; the host reads a copy of the result."""

    def __init__(self) -> None:
        self.launched: list[int] = []  # how often each record was
        self.unread: set[int] = set()  # launched, their results not yet taken
        self.most_unread = 0

    def __call__(self, work: Callable[[Clock], Tensor], like: Tensor, pool: object, engines: object = ()) -> "Recorded":
        self.launched.append(0)
        return Recorded(self, len(self.launched) - 1, work, like)


class Recorded:
    def __init__(self, recorder: Recorder, index: int, work: Callable[[Clock], Tensor], like: Tensor) -> None:
        self.clock = Clock(like.device)
        self._recorder, self._index, self._work = recorder, index, work
        self._result = like.clone()

    def launch(self) -> None:
        self._recorder.launched[self._index] += 1
        self._recorder.unread.add(self._index)
        self._recorder.most_unread = max(self._recorder.most_unread, len(self._recorder.unread))
        self._result.copy_(self._work(self.clock))

    def table(self) -> Tensor:
        self._recorder.unread.discard(self._index)
        return self._result
