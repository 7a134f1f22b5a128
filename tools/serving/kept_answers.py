"""Responses that clients ask to be stored: in memory, as long as there is room, and for the key that asked for them."""

import threading
from collections import Counter, OrderedDict

MOST_BYTES = 2**26  # of all of them together


class KeptAnswers:
    """Keeps answers as JSON. Where there is no room, the caller who has the most loses what it stored longest ago.

    So no caller loses anything before it holds its share, whatever others store.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._kept: dict[str, OrderedDict[str, bytes]] = {}  # by caller and id
        self._held: Counter[str] = Counter()  # bytes of each caller
        self._lock = threading.Lock()  # long answers are written in threads
        self.held_bytes = 0

    def keep(self, caller: str, name: str, answer: bytes) -> None:
        with self._lock:
            self._kept.setdefault(caller, OrderedDict())[name] = answer
            self._count(caller, len(answer))
            while self.held_bytes > self._most:
                [(largest, _)] = self._held.most_common(1)
                self._count(largest, -len(self._kept[largest].popitem(last=False)[1]))

    def find(self, caller: str, name: str) -> bytes | None:
        with self._lock:
            own = self._kept.get(caller)
            return None if own is None else own.get(name)

    def _count(self, caller: str, size: int) -> None:
        self._held[caller] += size
        self.held_bytes += size
