"""A draft model with tokens of its own, which reads each request's text in these.

Its caches have a length of their own: the host tokenises the end of each text again before a round, and all that the
draft has read before the first token that differs stays valid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from sys import maxsize
from typing import Self
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...engines import ALIGNMENT, FOREIGN_WINDOW, Bundle, Step
from ..memory.budget import SPREAD
from ..memory.model import Model
from ..memory.tokens import Tokens
from ..state.indexing import counting
from ..translation.own_text import OwnText
from ..translation.translation import Translation
from .asking import Asking

BUDGET = 2048  # tokens that it reads ahead of a round of what may wait
NOT_RUN = -1  # where a step has read nothing


class Held:
    """The draft's share of a request: its text, and the tokens that are in the row of the cache."""

    def __init__(self, translation: Translation) -> None:
        self.text = OwnText(translation)
        self.tokens: list[int] = []

    def agreed(self) -> int:
        """Return how many tokens at the beginning of the row are those of the text."""
        most = min(len(self.tokens), len(self.text.ids))
        differs = (place for place in range(most) if self.tokens[place] != self.text.ids[place])
        return most if self.tokens[:most] == self.text.ids[:most] else next(differs)


@dataclass(frozen=True)
class Steps:
    """The steps in which all rows read: the last tokens of their texts, then what the draft says, one by one."""

    runs: list[Step]
    logits: Tensor  # [A, 1, V] which each step gives and the next one overwrites
    fed: Tensor  # [K, A], what each step has read last; of the first only that it has run
    start: Tensor  # [K, A], where each begins; the first begins at its window's start

    def run(self, i: int, tokens: Tensor | None = None) -> Tensor:
        """Read the last tokens [A] that the draft has said, if it has said any; return the logits."""
        self.fed[i].fill_(0) if tokens is None else self.fed[i].copy_(tokens)
        self.runs[i].run()
        return self.logits


class ForeignDraft:
    """One of a decoder, for all drafters that run it."""

    def __init__(self, model: Model, translation: Translation, longest: int, limited: bool) -> None:
        self.model, self.translation = model, translation
        self._longest, self._limited = longest, limited
        self._held: WeakKeyDictionary[Asking, Held] = WeakKeyDictionary()
        self._device, max_batch = torch.device(model.engine.device), len(model.cache.entries)
        self._width = min(FOREIGN_WINDOW, model.engine.read_width)  # what it lacks before is read ahead of the round
        self._window = torch.zeros(max_batch, self._width, dtype=torch.int64, device=self._device)
        self._start, self._length = (torch.zeros(max_batch, dtype=torch.int64, device=self._device) for _ in range(2))
        self._last = torch.zeros(max_batch, 1, dtype=torch.int64, device=self._device)  # where a window ends
        self._steps: dict[tuple[int, int], Steps] = {}
        self._version = -1  # of the cache that the steps are over
        self._running: tuple[Tensor, list[tuple[int, Held, int]]] | None = None  # what the round that is launched reads

    @classmethod
    def open(cls, bundle: Bundle, model: Model, target: Tokenizer, limited: bool) -> Self:
        assert bundle.foreign is not None
        translation = Translation.read(bundle, target, model.engine.device)
        return cls(model, translation, bundle.models[bundle.foreign].contract.max_length, limited)

    def follow(self, request: Asking) -> int:
        """Read what a request has become; return how many tokens the draft may say after its text."""
        self._learn()
        if request not in self._held:
            self._held[request] = Held(self.translation)
        text = self._held[request].text
        text.follow(request.prompt, request.token_ids)
        most = min(self._longest, SPREAD * request.longest) if self._limited else self._longest
        return max(0, most - len(text.ids)) if text.whole and text.ids else 0

    def text(self, request: Asking) -> OwnText:
        return self._held[request].text

    def holds(self, request: Asking) -> list[int]:
        """Return the tokens that its row of the cache has of a request, after all rounds."""
        self._learn()
        return self._held[request].tokens if request in self._held else []

    def ended(self, request: Asking) -> None:
        self._held.pop(request, None)

    def read(self, requests: Sequence[Asking], asked: Mapping[Asking, int], count: int) -> tuple[Steps, list[bool]]:
        """Let rows read what they lack but their last tokens; return so many steps, the first of which reads these.

        Also return which rows can take part: those that are `asked`, if they have read all else.
        """
        cache, budget, able = self.model.cache, BUDGET, list[bool]()
        for row, request in enumerate(requests):
            able.append(request in asked)
            if able[-1]:
                most = maxsize if request.params.keeps_its_draft else max(0, budget)
                budget -= self._read_ahead(row, self._held[request], most)
                able[-1] = cache.entries[row] >= self._begin(self._held[request])
        texts = [self._held[request].text.ids if can else [] for request, can in zip(requests, able, strict=True)]
        starts = [max(0, len(ids) - self._width) if ids else cache.entries[row] for row, ids in enumerate(texts)]
        cache.make_room(0, starts, [self._width + count] * len(starts))
        for row, (request, begin) in enumerate(zip(requests, starts, strict=True)):
            if able[row]:
                self._held[request].tokens = list(texts[row])
                cache.wrote(row, begin, len(texts[row]) + count - 1)
        padding = [0] * self._width
        windows = [(ids[begin:] + padding)[: self._width] for ids, begin in zip(texts, starts, strict=True)]
        lengths = [len(ids) or begin + 1 for ids, begin in zip(texts, starts, strict=True)]
        batch = len(requests)
        for memory, values in ((self._window, windows), (self._start, starts), (self._length, lengths)):
            memory[:batch] = torch.tensor(values)
        torch.sub(self._length - 1, self._start, out=self._last[:, 0])
        steps = self._of(batch, count)
        torch.add(self._length[:batch] - 1, counting(count, self._device)[:, None], out=steps.start)
        steps.fed.fill_(NOT_RUN)
        return steps, able

    def launch(self, steps: Steps, requests: Sequence[Asking], able: Sequence[bool]) -> None:
        """Note that a round will run these steps, which `read` has returned last."""
        held = [self._held.get(request) for request in requests]
        self._running = steps.fed, [(row, one, len(one.text.ids)) for row, one in enumerate(held) if one and able[row]]

    def note(self, request: Asking, fed: Sequence[int]) -> None:
        """Note what a row has read after its text."""
        self._held[request].tokens += fed

    def _learn(self) -> None:
        """Find out what the last round has read."""
        if self._running is None:
            return
        (fed, rows), self._running = self._running, None
        read = fed.t().tolist()
        for row, held, length in rows:
            ran, *tokens = read[row]
            del held.tokens[max(0, length - self._width) if ran == NOT_RUN else length :]
            held.tokens += takewhile(lambda token: token != NOT_RUN, tokens)

    def _begin(self, held: Held) -> int:
        """Return where the tokens begin that the first step of a round reads."""
        return max(0, len(held.text.ids) - self._width)

    def _read_ahead(self, row: int, held: Held, most: int) -> int:
        """Read what a row lacks before that, at most so many tokens; return how many."""
        cache, ids = self.model.cache, held.text.ids
        valid = min(held.agreed(), cache.entries[row], len(ids) - 1)
        cache.wrote(row, valid, valid)
        count = min(most, max(0, self._begin(held) - valid))
        if count:
            self.model.prefill([row], [torch.tensor(ids[: valid + count], device=self._device)])
        held.tokens = ids[: cache.entries[row]]
        return count

    def _of(self, batch: int, count: int) -> Steps:
        """Make each kind of steps once, as long as the cache stays where it is."""
        if self.model.cache.version != self._version:
            self._steps.clear()
            self._version = self.model.cache.version
        if (batch, count) not in self._steps:
            step, logits = self.model.step, self.model.logits(batch, 1)
            aligned = ALIGNMENT // torch.int64.itemsize
            memory = torch.zeros(2, count, -(-batch // aligned) * aligned, dtype=torch.int64, device=self._device)
            fed, start = memory[:, :, :batch]
            runs = [step(Tokens(self._window[:batch], self._start[:batch]), logits, self._last[:batch])]
            runs += [step(Tokens(fed[i, :, None], start[i]), logits) for i in range(1, count)]
            self._steps[batch, count] = Steps(runs, logits[..., : self.translation.vocab_size], fed, start)
        return self._steps[batch, count]
