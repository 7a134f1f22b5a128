"""How much of a certificate is done, and how long the rest will take: from what its checks usually take of it."""

from collections.abc import Mapping
from dataclasses import dataclass

SOON = 0.02  # of the work: before it is done there is no saying how fast the rest will go


@dataclass
class TimeLeft:
    work: Mapping[str, float]  # what each check takes, in any unit, in the order in which they run
    share: float = 0.0  # that is done

    def reach(self, check: str, done: float) -> None:
        """So much of the check is done, from 0 to 1; what was reached once is not taken back."""
        names = list(self.work)
        before = sum(self.work[name] for name in names[: names.index(check)])
        self.share = max(self.share, (before + self.work[check] * min(1.0, done)) / sum(self.work.values()))

    def seconds(self, elapsed: float) -> float | None:
        """Return the time left if the rest goes as fast as what is done; None while too little is."""
        return elapsed * (1 - self.share) / self.share if self.share >= SOON else None
