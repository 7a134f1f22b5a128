"""Responses that clients ask to be stored: in memory, as long as there is room, and for the key that asked for them."""

import threading
from collections import OrderedDict

MOST_BYTES = 2**26  # of all of them together


class KeptAnswers:
    """Keeps answers as JSON; those go first that were stored longest ago."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # by caller and id
        self._lock = threading.Lock()  # long answers are written in threads
        self.held_bytes = 0

    def keep(self, caller: str, name: str, answer: bytes) -> None:
        with self._lock:
            self._kept[caller, name] = answer
            self.held_bytes += len(answer)
            while self.held_bytes > self._most:
                self.held_bytes -= len(self._kept.popitem(last=False)[1])

    def find(self, caller: str, name: str) -> bytes | None:
        with self._lock:
            return self._kept.get((caller, name))
