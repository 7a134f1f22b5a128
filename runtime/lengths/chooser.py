"""Chooses what a request drafts in its next round, and learns from the last one."""

from collections.abc import Sequence

from ..requests.metrics import Beside, Outcome
from ..state.asked import NOTHING, Share

TRIAL = 2  # proposals in a round that tries again what did not pay


class Chooser:
    """Each live request has a chooser. This one always wants the same."""

    def __init__(self, wanted: Share = NOTHING) -> None:
        self._wanted = wanted

    @property
    def wanted(self) -> Share:
        """Its share of the next round."""
        return self._wanted

    @property
    def drafters(self) -> Sequence[str]:
        """All drafters that it may ever use."""
        return self._wanted.names

    def observe(self, drafter: str, outcome: Outcome, entropies: Sequence[float], beside: Beside | None = None) -> None:
        """Learn from a round that has ended; `entropies` are the draft's at the examined proposals."""


class Pause:
    """Counts the rounds that did not use something, to tell when it is worth another trial.

    After each trial that fails, the next one takes longer to come.
    """

    FIRST, LONGEST = 16, 128  # rounds

    def __init__(self) -> None:
        self.rounds, self._patience = 0, self.FIRST
        self.least = 0.0  # rounds that a trial has to wait for, whatever came of earlier ones

    @property
    def over(self) -> bool:
        """Whether the next round should be a trial."""
        return self.rounds >= max(self._patience, self.least)

    def count(self, used: bool) -> None:
        """Count a round that has ended; `used` means that it was chosen on merit, not for a trial."""
        if used:
            self.rounds, self._patience = 0, self.FIRST
        elif self.over:
            self.rounds, self._patience = 0, min(2 * self._patience, self.LONGEST)
        else:
            self.rounds += 1
