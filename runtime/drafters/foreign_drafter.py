"""The host part of all drafters that run a draft with tokens of its own."""

from collections.abc import Mapping

from .asking import Asking
from .drafter import Drafter, Resources


class ForeignDrafter(Drafter):
    usual = False
    may_come_short = True  # a row proposes nothing while the draft has not read it, or cannot
    reads_outputs = True

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        assert resources.foreign is not None
        self.draft = resources.foreign
        self._wanted: dict[Asking, int] = {}  # proposals of the next round

    def ready(self, request: Asking, most: int, turn: int) -> int:
        if count := min(most, self.draft.follow(request)):
            self._wanted[request] = count
        return count

    def wanted(self) -> Mapping[Asking, int]:
        """Return what it was ready to propose, which is forgotten."""
        wanted, self._wanted = self._wanted, {}
        return wanted

    def ended(self, request: Asking) -> None:
        self._wanted.pop(request, None)  # it was ready for a round that never ran
        self.draft.ended(request)
