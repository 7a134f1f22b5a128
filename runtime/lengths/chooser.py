"""What a request drafts in its next round, and what it learns from the last one."""

from collections.abc import Sequence
from typing import NamedTuple

from ..drafters import NONE
from ..requests.metrics import Outcome


class Wanted(NamedTuple):
    """How many proposals a round, from which drafter, and the draft's entropy at which they end."""

    length: int
    drafter: str
    entropy_limit: float | None = None


NOTHING = Wanted(0, NONE)


class Chooser:
    """One for each live request. This one always wants the same."""

    def __init__(self, wanted: Wanted = NOTHING) -> None:
        self._wanted = wanted if wanted.length and wanted.drafter != NONE else NOTHING

    @property
    def wanted(self) -> Wanted:
        """What it wants of the next round."""
        return self._wanted

    @property
    def drafters(self) -> Sequence[str]:
        """All that it may ever want to use."""
        return () if self._wanted is NOTHING else (self._wanted.drafter,)

    def observe(self, drafter: str, outcome: Outcome, entropies: Sequence[float]) -> None:
        """A round has ended; `entropies` are the draft's at the examined proposals."""


class Pause:
    """Counts the rounds without something that might have become worth trying.

    Each time it was tried in vain the next trial takes longer to come.
    """

    FIRST, LONGEST = 16, 128  # rounds

    def __init__(self) -> None:
        self._rounds, self._patience = 0, self.FIRST

    @property
    def over(self) -> bool:
        """Whether the next round should be a trial."""
        return self._rounds == self._patience

    def count(self, used: bool) -> None:
        """One more round has ended; `used` means that it was chosen for its worth, not for a trial."""
        if used:
            self._rounds, self._patience = 0, self.FIRST
        elif self.over:
            self._rounds, self._patience = 0, min(2 * self._patience, self.LONGEST)
        else:
            self._rounds += 1
