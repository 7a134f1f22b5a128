"""Fills the models' caches with what they lack: prompts, chunk by chunk, and tokens that a draft has not seen yet."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH, PREFILL_WIDTH
from ..memory.model import Model
from ..requests.request import Request
from ..round.result import token_logprobs
from ..state.rows import Rows

# The narrowest chunk of a prompt: engines may round the tokens of narrow steps in another way.
NARROWEST = 2 * (MAX_DRAFT_LENGTH + 1)
PADDING = 1.25  # a step may be this many times as large as the tokens of its prompts
DRAFT_BUDGET = 4 * PREFILL_WIDTH  # tokens that drafts read between two rounds, sooner than a target reads a chunk


class Prefill:
    """Feeds committed tokens to the models; the entries of their caches say how many."""

    def __init__(self, rows: Rows, drafts: Sequence[Model]) -> None:
        self._rows, self._drafts = rows, drafts

    def read(self, model: Model, wanted: Mapping[int, int], budget: int) -> tuple[int, dict[int, Tensor]]:
        """Feed the next chunk of rows that lack some of their `wanted` entries, the first of them whatever it takes.

        Others are fed only within `budget` tokens and if the engine reads them together. Return how many tokens that
        were, and the logits [1, V] after each row's last one.
        """
        fed: dict[int, int] = {}
        for row, entries in wanted.items():
            chunk = _next_chunk(entries - model.cache.entries[row], 0 if model.recurrent else NARROWEST)
            chunk = _uncut(model, row, chunk, entries)
            if chunk > 0 and (not fed or _fits(model, fed, row, chunk, budget)):
                fed[row] = chunk
        if not fed:
            return 0, {}
        tokens = [self._rows.tokens[row, : model.cache.entries[row] + count] for row, count in fed.items()]
        logits = model.prefill(list(fed), tokens)
        return sum(fed.values()), {row: logits[row - min(fed)] for row in fed}

    def catch_up(self, wanted: Mapping[int, Mapping[Model, int]], budget: int) -> int:
        """Feed drafts the entries that each row wants, as far as the budget goes; return what is left of it."""
        for draft in self._drafts:
            entries = {row: own[draft] for row, own in wanted.items() if draft in own}
            while budget > 0 and (fed := self.read(draft, entries, PREFILL_WIDTH)[0]):
                budget -= fed
        return budget

    def score(self, target: Model, request: Request, row: int) -> int:
        """Compute the next log-probabilities of a prompt.

        They continue after what the row holds: a request that had given up its place begins again. After the last ones
        the row is emptied, so that the prompt is read, and rounded, as always.
        """
        assert request.params.prompt_logprobs is not None
        start = target.cache.entries[row]
        last = len(request.prompt) - 1
        count = _uncut(target, row, min(PREFILL_WIDTH, last - start), last)
        logits = target.score(row, self._rows.tokens[row, start : start + count])
        following = request.prompt[start + 1 : start + 1 + count]
        request.prompt_logprobs[start + 1 :] = token_logprobs(logits, following, request.params.prompt_logprobs)
        if not request.unscored:
            target.cache.free(row)
        return count


def _uncut(model: Model, row: int, tokens: int, entries: int) -> int:
    """Return how many tokens to read next of a row that is to have so many entries, so that no call cuts an image."""
    if model.images is None:
        return tokens
    begin = model.cache.entries[row]
    return min(model.images.whole(row, begin + tokens), entries) - begin


def _fits(model: Model, fed: Mapping[int, int], row: int, chunk: int, budget: int) -> bool:
    """Whether a step that feeds these rows may feed one more.

    If the rows of a step have one width, it must be the next row, leave little of the step to padding, and begin where
    they do, so that padding stays within the cache that the longest needs.
    """
    if not model.engine.reads_together:
        return False
    tokens = sum(fed.values()) + chunk
    if model.engine.contract.in_blocks:
        return tokens <= budget
    padded = (len(fed) + 1) * max(chunk, *fed.values())
    entries = model.cache.entries
    return row - 1 in fed and entries[row] == entries[row - 1] and padded <= min(budget, PADDING * tokens)


def _next_chunk(missing: int, narrowest: int = NARROWEST) -> int:
    """Return how many tokens to read next, so that nothing narrow remains.

    Recurrent layers read any chunk in parts, the last of which may be narrow, and their states are copied where a whole
    chunk ends.
    """
    rest = missing - PREFILL_WIDTH
    return missing if rest <= 0 else PREFILL_WIDTH - max(0, narrowest - rest)
