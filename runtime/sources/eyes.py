"""The graph that sees for a target: it reads each image once, for all rows whose prompts have it."""

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from ...engines import IMAGES, Engine, VisionContract
from ..memory.image_rows import ImageRows
from ..memory.sight import Picture


class Eyes:
    """Keeps what it has seen last, up to `most_bytes`, and the very last image in any case."""

    def __init__(self, engine: Engine, contract: VisionContract, rows: ImageRows, most_bytes: int) -> None:
        self._engine, self._contract, self._rows, self._most = engine, contract, rows, most_bytes
        self._kept: OrderedDict[tuple[str, str], Tensor] = OrderedDict()

    @property
    def kept_bytes(self) -> int:
        return sum(entries.nbytes for entries in list(self._kept.values()))

    def see(self, wanted: Mapping[int, tuple[str, int]]) -> int:
        """Give rows the entries of images that they lack for their tokens from some place on, as far as they are kept.

        The first one that is not is seen now; return how many entries that makes. An image is known by those alone who
        share a key.
        """
        spent = 0
        for row, (key, read) in wanted.items():
            for number, picture, entries in list(self._rows.lacking(row, read)):
                known = key, picture.digest
                if known not in self._kept:
                    if spent:
                        continue
                    self._kept[known] = self._seen(picture, entries)
                    spent = entries
                self._kept.move_to_end(known)
                self._rows.put(row, number, self._kept[known])
                self._forget_some()
        return spent

    def has_seen(self, row: int, read: int) -> bool:
        """Whether a row has all images that its tokens from this one on need."""
        return not any(self._rows.lacking(row, read))

    def _seen(self, picture: Picture, entries: int) -> Tensor:
        """Return the entries of a picture [entries, size]."""
        device, dtype = self._engine.device, getattr(torch, self._contract.dtype)
        given = {name: torch.from_numpy(array).to(device) for name, array in picture.inputs.items()}
        found = torch.zeros(entries, self._contract.size, dtype=dtype, device=device)
        self._engine.step(given, {IMAGES: found}).run()
        return found

    def _forget_some(self) -> None:
        while len(self._kept) > 1 and self.kept_bytes > self._most:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        self._kept.clear()

    def close(self) -> None:
        self._engine.close()
        self._kept.clear()
