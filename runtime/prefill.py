"""Fills the models' caches with what they lack: prompts, chunk by chunk, and tokens that a draft has not seen yet."""

from collections.abc import Sequence

from ..engines import PREFILL_WIDTH
from .memory.model import Model
from .requests.request import Request
from .round.rows import Rows


class Prefill:
    """Feeds committed tokens to the models; the entries of their caches say how many."""

    def __init__(self, rows: Rows, target: Model, draft: Model | None) -> None:
        self._rows, self._target, self._draft = rows, target, draft

    def read_prompt(self, request: Request, row: int, budget: int, with_draft: bool) -> int:
        """Feed at most `budget` tokens of a prompt, target first; return how many, or zero once all is read.

        The first round itself reads the prompt's last token in the target and its last two in the draft.
        """
        for model, wanted in ((self._target, len(request.prompt) - 1), (self._draft, len(request.prompt) - 2)):
            if model is not None and (model is self._target or with_draft):
                missing = wanted - model.cache.entries[row]
                if missing > 0:
                    return self._feed(model, row, min(budget, missing))
        return 0

    def catch_up(self, live: Sequence[Request], with_draft: Sequence[bool]) -> None:
        """Feed the draft all tokens except the last two, which its first step reads.

        A row that turns to the draft late has many tokens to feed, one chunk a step, and drafts nothing until then.
        """
        if self._draft is None:
            return
        for row, (request, needed) in enumerate(zip(live, with_draft, strict=True)):
            missing = request.length - 2 - self._draft.cache.entries[row]
            if needed and missing > 0:
                self._feed(self._draft, row, min(missing, PREFILL_WIDTH))

    def _feed(self, model: Model, row: int, count: int) -> int:
        start = model.cache.entries[row]
        model.prefill(row, self._rows.tokens[row, start : start + count], start)
        return count
