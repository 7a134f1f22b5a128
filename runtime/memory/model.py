"""One model of a bundle: its engine, and a cache that follows the live rows."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...engines import (
    MOST_READ,
    ROW,
    Engine,
    Masks,
    Step,
    last_rows,
    line,
    make_step,
)
from ...engines.engine import chunks
from .adapter_pool import AdapterPool
from .bucket import bucket
from .cache import nbytes
from .caches import make_cache
from .features import Features
from .image_rows import ImageRows
from .tokens import NO_MORE, Absorbs, Tokens, preceded

LINES = 64  # shapes of steps whose tokens' places are kept


class Model:
    """Binds an engine to its cache and to one memory for logits, which every step of the model overwrites."""

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        max_rows: int,
        capacity: int,
        most_tokens: int | None = None,
        kept_blocks: int = 0,
        features: Features | None = None,
        masks: Masks | None = None,
        longest_source: int = 0,
        own_tokens: bool = False,
        adapters: AdapterPool | None = None,
        images: ImageRows | None = None,
    ) -> None:
        self.engine = engine
        self._features = features  # of a head: what its target keeps for it
        self._masks = masks
        self.adapters = adapters  # that its rows may have
        self.images = images  # in the prompts of its rows
        self.own_tokens = own_tokens  # not those of the target, so that a row has another length
        self._max_rows, self._capacity = max_rows, capacity
        self.vocab_size = vocab_size  # the graph may have more, as padding
        self.cache = make_cache(engine, max_rows, capacity, most_tokens, kept_blocks, longest_source)
        self._logits = torch.zeros(0, device=engine.device)
        self._last_rows: dict[tuple[int, int, int], Tensor] = {}  # never written to, as are the lines
        self._spare: dict[str, Tensor] = {}  # of states that a call makes anew
        self._line = lru_cache(LINES)(partial(line, device=engine.device))
        engine.reserve(max_rows, capacity)

    @property
    def reads_again(self) -> bool:
        """Whether it must read again what it has read, and kept, as its own proposals.

        That were masks, or a head's own states where its target's features belong.
        """
        return bool((self._features or self._masks) and self.engine.contract.kept)

    @property
    def recurrent(self) -> bool:
        """Whether it keeps states that absorb tokens, so that it never reads again what it has read before."""
        return self.cache.recurrence is not None

    def reads_for(self, proposals: int) -> int:
        """Return how many tokens after the last committed one its steps may read, to make so many proposals."""
        return proposals + (0 if self._masks is None else self._masks.reads(proposals))

    def logits(self, batch: int, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for logits [B, R, V]."""
        size = batch * rows * self.engine.contract.vocab_size
        if size * dtype.itemsize > self._logits.nbytes:
            self._logits = torch.zeros(-(-size * dtype.itemsize // torch.float32.itemsize), device=self.engine.device)
        return self._logits.view(dtype)[:size].view(batch, rows, -1)

    @property
    def logits_bytes(self) -> int:
        """The bytes of logits, and of states that a call makes anew."""
        return nbytes([self._logits, *list(self._spare.values())])

    @property
    def step_bytes(self) -> int:
        """The most bytes that a step of a round takes meanwhile, as far as its engine knows."""
        return self.engine.step_bytes(self._max_rows, self._capacity)

    def bucket(self, needed: int) -> int | None:
        """Return how many entries of a row the steps should read if they need this many; None means all."""
        return bucket(needed, self._capacity) if self.engine.reads_prefixes else None

    def step(
        self,
        tokens: Tokens,
        logits: Tensor,
        logit_rows: Tensor | None = None,
        hidden: Tensor | None = None,
        absorbs: Absorbs = NO_MORE,
        best_alone: bool = False,
    ) -> Step:
        """Make a step that reads tokens, of which the last ones give logits, or `logit_rows` [B, R].

        A head reads its target's features of the tokens before, or the `hidden` states [B, S, size] that are given.
        Of the logits the best alone need be right if nobody reads others.
        """
        input_ids, first_row, ancestry = tokens.ids, tokens.first_row, tokens.ancestry
        (batch, width), rows = input_ids.shape, logits.shape[1]
        engine = self.engine.picking(self.vocab_size) if best_alone else self.engine
        shape = batch, width, rows
        if logit_rows is None and shape not in self._last_rows:
            self._last_rows[shape] = last_rows(*shape, self.engine.device)
        inputs = {
            "input_ids": input_ids,
            "start": tokens.start,
            "logit_rows": self._last_rows[shape] if logit_rows is None else logit_rows,
        }
        inputs |= (
            self._line(batch, width)
            if ancestry is None
            else {"depths": ancestry.depths, "ancestors": ancestry.ancestors}
        )
        cache = self.cache.tensors(first_row, batch)
        if self.engine.reads_prefixes:
            cache |= {name: cache[name][:, :, : tokens.entries_read] for name in self.engine.contract.cache_names}
        if self.adapters is not None:
            inputs |= self.adapters.inputs(first_row, batch)
        if self.images is not None:
            inputs |= {**self.images.inputs(first_row, batch), **tokens.images}
        if tokens.widths is not None and self.engine.contract.in_blocks:
            inputs["widths"] = tokens.widths
        if self.cache.recurrence is not None:
            inputs["pending"] = torch.zeros(batch, absorbs.since, dtype=torch.int64, device=self.engine.device)
            given = {"logits": logits} | self._anew(batch)
            step = make_step(engine, cache, inputs, given, advances=not absorbs.goes_on)
            return absorbs.over(self.cache.recurrence, step, first_row)
        if self._features is None:
            return make_step(engine, cache, inputs, {"logits": logits})
        if hidden is not None:
            return make_step(engine, cache, inputs | {"past_hidden": hidden}, {"logits": logits})
        step = make_step(engine, cache, inputs, {"logits": logits})
        return preceded(self._features.into(step.inputs["past_hidden"], first_row, tokens.start), step)

    def take_part(self, able: Sequence[bool]) -> None:
        """Let the states of those first rows advance that are able to; in others a round's steps leave them alone."""
        assert self.cache.recurrence is not None
        self.cache.recurrence.runs[: len(able)] = torch.tensor(able)

    def _anew(self, batch: int) -> dict[str, Tensor]:
        """Return memory for the states that a call makes anew before they replace the old, shared by all steps."""
        for state in self.engine.contract.of_kind(ROW):
            name = f"present_{state.name}"
            if name not in self._spare or len(self._spare[name]) < batch:
                size, dtype = state.memory(batch, 0), getattr(torch, state.dtype)
                self._spare[name] = self.engine.everywhere(torch.empty(size, dtype=dtype, device=self.engine.device))
        return {name: each[:batch] for name, each in self._spare.items()}

    def prefill(self, rows: Sequence[int], tokens: Sequence[Tensor]) -> Tensor:
        """Write the missing entries of these rows, whose first tokens [S] are given; return logits [B, 1, V].

        They are those of the last token of each row from the first that is given to the last, garbage in between. More
        than one row may be given only if the engine reads them together: any rows in blocks, else neighbours that begin
        at the same entry.
        """
        if len(rows) == 1 and not self.engine.contract.in_blocks:
            [row], [each] = rows, tokens
            return self._prefill_row(row, each)
        missing = {row: each[self.cache.entries[row] :] for row, each in zip(rows, tokens, strict=True)}
        first, batch = min(rows), max(rows) - min(rows) + 1
        starts = self.cache.entries[first : first + batch]
        assert self.engine.contract.in_blocks or (len(rows) == batch and len(set(starts)) == 1)
        if self.recurrent:
            return self._prefill_in_parts(first, [missing[row] for row in range(first, first + batch)])
        widths = [len(missing.get(row, ())) for row in range(first, first + batch)]
        self.cache.make_room(first, starts, widths)
        device = self.engine.device
        input_ids = torch.zeros(batch, max(widths), dtype=torch.int64, device=device)
        for row, each in missing.items():
            input_ids[row - first, : len(each)] = each
        counts, logits = torch.tensor(widths, device=device), self.logits(batch, 1)
        start, last = torch.tensor(starts, device=device), (counts - 1).clamp_(min=0)[:, None]
        given = self._with_images(Tokens(input_ids, start, first, widths=counts), starts, widths)
        self.step(given, logits, last).run()
        for row, each in missing.items():
            begin = self.cache.entries[row]
            self.cache.wrote(row, begin, begin + len(each))
        return logits

    def _prefill_row(self, row: int, tokens: Tensor) -> Tensor:
        start, logits = self.cache.entries[row], self.logits(1, 1)
        self.cache.make_room(row, [start], [len(tokens) - start])
        widths = self.engine.prefill_widths(len(tokens) - start)
        if self.recurrent:
            widths = [part for width in widths for part in chunks(width, MOST_READ)]
        if self.images is not None:
            widths = self.images.widths(row, start, widths)
        for width in widths:
            begin, since = torch.full((1,), start, device=tokens.device), max(1, self.cache.since(row))
            start += width
            chunk = Tokens(tokens[None, start - width : start], begin, row, self.bucket(start))
            chunk = self._with_images(chunk, [start - width], [width])
            self.step(chunk, logits, absorbs=Absorbs(since, width)).run()
            self.cache.wrote(row, start - width, start, absorbed=start)
        return logits

    def _prefill_in_parts(self, first: int, missing: Sequence[Tensor]) -> Tensor:
        """Read rows from the first on, in parts that states can absorb: of each row its own tokens, and no padding."""
        found, device = torch.empty_like(self.logits(len(missing), 1)), self.engine.device
        rows, lengths = range(first, first + len(missing)), [len(each) for each in missing]
        self.cache.make_room(first, [self.cache.entries[row] for row in rows], lengths)
        for read in range(0, max(lengths), MOST_READ):
            parts = [each[read : read + MOST_READ] for each in missing]
            widths, entries = [len(each) for each in parts], [self.cache.entries[row] for row in rows]
            since = max(1, *map(self.cache.since, rows))
            input_ids, counts = pad_sequence(parts, batch_first=True), torch.tensor(widths, device=device)
            start, last = torch.tensor(entries, device=device), (counts - 1).clamp_(min=0)[:, None]
            logits = self.logits(len(parts), 1)
            self.step(Tokens(input_ids, start, first), logits, last, absorbs=Absorbs(since, counts)).run()
            for row, entry, width in zip(rows, entries, widths, strict=True):
                if width:
                    self.cache.wrote(row, entry, entry + width, absorbed=entry + width)
                    found[row - first] = logits[row - first]
        return found

    def _with_images(self, tokens: Tokens, starts: Sequence[int], widths: Sequence[int]) -> Tokens:
        """Put the entries of images among tokens that are read of prompts, so many of each row."""
        if self.images is None:
            return tokens
        ids, given = self.images.among(tokens.ids, tokens.first_row, starts, widths)
        return replace(tokens, ids=ids, images=given)

    def score(self, row: int, tokens: Tensor) -> Tensor:
        """Write the entries of `tokens` [S] after those that a row has; return the logits [S, V] after each."""
        found, start = [], self.cache.entries[row]
        self.cache.make_room(row, [start], [len(tokens)])
        most = min(self.engine.verify_width, MOST_READ) if self.recurrent else self.engine.verify_width
        widths = chunks(len(tokens), most)
        if self.images is not None:
            widths = self.images.widths(row, start, widths)
        for width in widths:
            chunk, tokens = tokens[:width], tokens[width:]
            first, logits = torch.full((1,), start, device=chunk.device), self.logits(1, width)
            since = max(1, self.cache.since(row))
            given = Tokens(chunk[None], first, row, self.bucket(start + width))
            given = self._with_images(given, [start], [width])
            self.step(given, logits, absorbs=Absorbs(since, width)).run()
            found.append(logits[0, :, : self.vocab_size].clone())
            self.cache.wrote(row, start, start + width, absorbed=start + width)
            start += width
        return torch.cat(found)

    def close(self) -> None:
        self.engine.close()
        self.cache.close()
        self._logits, self._spare = torch.zeros(0), {}
