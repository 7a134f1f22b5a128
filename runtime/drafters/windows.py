"""Says how many of the last committed tokens a draft model reads first in a round, and what it lacks before that."""

from collections.abc import Mapping, Sequence

from ..memory.model import Model
from ..state.asked import Share
from ..state.plan import LEAST_WINDOW
from .drafter import Drafter


class Windows:
    """Knows which draft models a row may run next, by what it wants."""

    def __init__(self, drafters: Mapping[str, Drafter], drafts: Sequence[Model]) -> None:
        self._drafters, self._drafts = drafters, drafts

    def draft_of(self, names: Sequence[str]) -> Model | None:
        """Return the first draft model that one of these drafters runs, or the first of all."""
        drafters = filter(None, map(self._drafters.get, names))
        return next((one.model for one in drafters if one.model is not None), next(iter(self._drafts), None))

    def widest(self, wanted: Sequence[Share]) -> int:
        """Return how many of a row's last tokens its draft reads first: beside other lines, all that a round commits.

        A head does so in any case. TensorRT's plans may be too narrow for that, and what a recurrent draft has
        absorbed it never reads again; it then reads what it lacks before the round.
        """
        if not any(self._reads_all(one) for one in wanted):  # nearly always
            return LEAST_WINDOW
        widest = max(LEAST_WINDOW, *(one.length + 1 for one in wanted))
        run = {drafter for one in wanted for name in one.names if (drafter := self._drafters.get(name))}
        return widest if all(drafter.reads_first(widest) for drafter in run) else LEAST_WINDOW

    def _reads_all(self, wanted: Share) -> bool:
        drafts = self.of(wanted.names)
        return bool(drafts) and (len(wanted.lines) > 1 or any(draft.reads_again for draft in drafts))

    def of(self, names: Sequence[str], widest: int = LEAST_WINDOW) -> dict[Model, int]:
        """Return which draft models these drafters run, and how many tokens they read first, up to the `widest`."""
        drafters = filter(None, map(self._drafters.get, names))
        return {drafter.model: drafter.window(widest) for drafter in drafters if drafter.model is not None}
