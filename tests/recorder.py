"""What stands for CUDA graphs where there is no GPU."""

from collections.abc import Callable

from torch import Tensor


class Recorder:
    """In place of CUDA: a record runs its work again, whole, as a replay would."""

    def __init__(self) -> None:
        self.records: list[int] = []  # how often each was replayed

    def __call__(self, work: Callable[[], Tensor], like: Tensor, pool: object) -> Callable[[], Tensor]:
        index = len(self.records)
        self.records.append(0)

        def replay() -> Tensor:
            self.records[index] += 1
            table = work()
            assert table.shape == like.shape
            return table

        return replay
