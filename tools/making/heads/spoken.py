"""Keep what the target says at temperature 1, and its hidden states with it, in files that are mapped into memory.

A head is taught several times with each text, so the target computes once what a head reads of it. Each batch has a
seed of its own: writing that was cut off goes on, and what it gives is what it would have given.
"""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....engines import RequestError
from ...console import in_bytes
from ...training_settings import HeadSettings
from .teacher import Teacher

TOGETHER = 128  # rows that the target writes at once
HELD_OUT = 10  # one row in so many
STORED = torch.bfloat16  # hidden states may be larger than float16 holds


@dataclass(frozen=True)
class Rows:
    """Some rows of text, with the target's hidden states beside each token."""

    tokens: Tensor  # [B, T]
    hidden: Tensor  # [B, T, layers, H]
    last: Tensor  # [B, T, H], of which its distribution follows


class Spoken:
    """Rows of `length` tokens: a prompt, and how the target continues it."""

    def __init__(self, folder: Path, settings: HeadSettings, layers: Sequence[int], teacher: Teacher) -> None:
        self.layers, self.device = tuple(layers), teacher.device
        self.length, self._seed = settings.length, settings.seed
        count, kept_of = settings.samples, (len(layers) + 1, teacher.projection.shape[1])
        needed = count * self.length * (torch.Size(kept_of).numel() * STORED.itemsize + torch.int32.itemsize)
        kept = folder / "tokens", folder / "hidden"
        place = next(one for one in folder.absolute().parents if one.exists())
        free = shutil.disk_usage(place).free + sum(_taken(file) for file in kept)
        if needed > free:
            raise RequestError(
                f"what the target says takes {in_bytes(needed)}, and {place} has {in_bytes(free)}; ask for fewer "
                "--samples, or choose another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._tokens = _mapped(kept[0], torch.int32, (count, self.length))
        self._hidden = _mapped(kept[1], STORED, (count, self.length, *kept_of))
        self.count = 0  # rows that are written

    def rows(self, chosen: Sequence[int] | Tensor) -> Rows:
        index = torch.as_tensor(chosen)
        hidden = self._hidden[index].to(self.device).float()
        return Rows(self._tokens[index].long().to(self.device), hidden[:, :, :-1], hidden[:, :, -1])

    @property
    def learned(self) -> Tensor:
        return torch.tensor([row for row in range(self.count) if row % HELD_OUT])

    @property
    def held_out(self) -> Tensor:
        return torch.arange(0, self.count, HELD_OUT)

    def tokens(self, chosen: Tensor) -> Tensor:
        return self._tokens[chosen].long()

    def write(self, teacher: Teacher, prompts: Sequence[Sequence[int]], goes_on: Callable[[], bool]) -> None:
        """Let the target write batch after batch, until all rows are written or `goes_on` says no before one."""
        batches = _alike(prompts, self._seed)
        while self.count < len(self._tokens) and goes_on():
            number = self.count // TOGETHER
            batch = batches[number % len(batches)]
            size = min(TOGETHER, len(self._tokens) - self.count)
            given = torch.tensor([batch[place % len(batch)] for place in range(size)], device=teacher.device)
            generator = torch.Generator(teacher.device).manual_seed((2 * self._seed + 1) * 2**32 + number)
            place = slice(self.count, self.count + size)
            self._continue(teacher, given, place, generator)
            self.count += size

    @torch.no_grad()
    def _continue(self, teacher: Teacher, given: Tensor, rows: slice, generator: torch.Generator) -> None:
        from transformers import DynamicCache

        cache, begin = DynamicCache(config=teacher.config), 0
        while True:
            end = begin + given.shape[1]
            hidden = teacher.read(given, self.layers, cache)
            self._tokens[rows, begin:end] = given.cpu().int()
            self._hidden[rows, begin:end] = hidden.cpu().to(STORED)
            if end == self.length:
                return
            distribution = teacher.logits(hidden[:, -1, -1]).softmax(-1)
            given, begin = torch.multinomial(distribution, 1, generator=generator), end


def _mapped(file: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_file(str(file), shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)


def _taken(file: Path) -> int:
    """Return the bytes on the disk: a file that is mapped takes them as it is filled."""
    return 512 * file.stat().st_blocks if file.exists() else 0


def _alike(prompts: Sequence[Sequence[int]], seed: int) -> list[list[Sequence[int]]]:
    """Batches of prompts of about one length, each cut to the shortest of its batch, so that none needs padding."""
    ordered = sorted(prompts, key=len)
    batches = [ordered[begin : begin + TOGETHER] for begin in range(0, len(ordered), TOGETHER)]
    random.Random(seed).shuffle(batches)
    return [[prompt[: len(batch[0])] for prompt in batch] for batch in batches]
