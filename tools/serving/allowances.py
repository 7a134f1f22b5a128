"""How much each key may ask for: requests in a minute, and rows at a time."""

import time
from collections.abc import Callable, Sequence
from math import ceil

from .errors import ApiError

SECONDS = 60
PER_MINUTE, ROWS = "requests_per_minute", "rows_per_key"  # as metrics call them


class Allowances:
    """Refuses what is beyond them; None allows as much as there is room for."""

    def __init__(self, requests: int | None = None, rows: int | None = None) -> None:
        self._requests, self._rows = requests, rows
        self._left: dict[str, tuple[float, float]] = {}  # of each caller: requests, and when that was so
        self.on_refusal: Callable[[str], None] = lambda reason: None

    def require_request(self, caller: str) -> None:
        """Count a request of this caller. Those that it does not make add up, to those of one minute at most."""
        if self._requests is None:
            return
        now, each = time.monotonic(), SECONDS / self._requests
        left, since = self._left.get(caller, (float(self._requests), now))
        left = min(self._requests, left + (now - since) / each)
        if left < 1:
            self.on_refusal(PER_MINUTE)
            said = f"this key has made its {self._requests} requests of a minute; wait, or ask for more at a time"
            raise _too_many(said, ceil((1 - left) * each))
        self._left[caller] = left - 1, now

    def require_rows(self, wanted: int, taken: Sequence[str], caller: str) -> None:
        """Let a caller have rows beside those that callers have `taken`; those that wait for one count as well."""
        if self._rows is None:
            return
        own = taken.count(caller)
        if wanted > self._rows:
            raise ApiError(
                400, f"{wanted} completions are asked for, a key may have {self._rows} at once; ask for less"
            )
        if own + wanted > self._rows:
            self.on_refusal(ROWS)
            said = f"this key has {own} completions under way, it may have {self._rows}; take their answers first"
            raise _too_many(said, 1)


def _too_many(said: str, seconds: int) -> ApiError:
    return ApiError(429, said, code="rate_limit_exceeded", headers={"retry-after": str(seconds)})
