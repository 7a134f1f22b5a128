"""How much each key may ask for: requests in a minute, and rows at a time."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

from .errors import ApiError

SECONDS = 60
PER_MINUTE, ROWS = "requests_per_minute", "rows_per_key"  # as metrics call them


class Allowances:
    """Refuses what is beyond them; None allows as much as there is room for."""

    def __init__(self, requests: int | None = None, rows: int | None = None) -> None:
        self._requests, self._rows = requests, rows
        self._made: dict[str, deque[float]] = {}  # of each caller: when it made its last requests, as many as it may
        self.on_refusal: Callable[[str], None] = lambda reason: None

    def require_request(self, caller: str) -> None:
        """Count a request of this caller, which makes no more than it may in any minute."""
        if self._requests is None:
            return
        now = time.monotonic()
        made = self._made.setdefault(caller, deque(maxlen=self._requests))
        if len(made) == self._requests and (wait := made[0] + SECONDS - now) > 0:
            self.on_refusal(PER_MINUTE)
            said = f"this key has made its {self._requests} requests of a minute; wait, or ask for more at a time"
            raise _too_many(said, ceil(wait))
        made.append(now)

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
