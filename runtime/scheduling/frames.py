"""Keeps a frame for each shape of a round, as long as the caches that it is bound to stay where they are."""

from collections.abc import Sequence

from ..memory.model import Model
from ..state.frame import Frame
from ..state.plan import Plan
from .capture import MOST_KINDS, Rounds


class Frames:
    """Makes each frame once. Rounds that were recorded over frames are forgotten with them."""

    def __init__(self, models: Sequence[Model], rounds: Rounds) -> None:
        self._models, self._rounds = models, rounds
        self._made: dict[object, Frame] = {}
        self._versions: list[int] = []  # of the caches that they were made for

    def of(self, plan: Plan, *, prefilled: bool = False) -> Frame:
        """Return the frame of a plan; `prefilled` if reading a prompt gives its logits."""
        versions = [model.cache.version for model in self._models]
        key = (plan.steps, plan.entries_read, prefilled)
        if versions != self._versions or (len(self._made) >= MOST_KINDS and key not in self._made):
            self.forget()
            self._versions = versions
        if key not in self._made:
            self._made[key] = Frame(plan, self._models[0], prefilled=prefilled)
        return self._made[key]

    def forget(self) -> None:
        self._made.clear()
        self._rounds.forget()
