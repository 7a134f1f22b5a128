"""Keep Whisper to its rules: some tokens begin no text, and times between the pieces of a text never decrease."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...state.proposal import ProposedTokens
from ...state.rows import Columns
from ..checks import require
from ..parameter_fields import ParameterFields
from .filter import Change, wide, widened

NO_TIME = 2**31


@dataclass(frozen=True)
class SpeechRules:
    """The rules of a text that was heard, for the parameter `extra["speech"]`."""

    begin_unsaid: tuple[int, ...] = ()  # tokens that may not be the first
    timed: bool = False  # each piece of text has a time before and after it
    end: int = 0  # the token that ends the text
    silent: int = 0  # the token that says that there are no times
    first_time: int = 0  # the time 0; all tokens after it are later times
    latest_first: int | None = None  # the highest number of a time that a text may begin with


class Numbers(NamedTuple):
    """The numbers of a row: what it has said, and its rules."""

    said: Any  # tokens
    before: Any  # the last token but one
    last: Any  # token
    time: Any  # the last that was said
    first: Any  # time that there is
    latest: Any  # with which a text may begin
    silent: Any
    end: Any


class Speech(Change):
    """Times come in pairs, the end of a piece and the beginning of the next, and where they are likelier than text."""

    fields: ClassVar = {"speech": "rules of a text that was heard"}
    reads_proposals = reads_trees = reported = True

    def check(self, params: ParameterFields) -> None:
        rules = params.extra.get("speech")
        require("speech", rules, rules is None or isinstance(rules, SpeechRules), "SpeechRules")

    def active(self, params: ParameterFields) -> bool:
        return params.extra.get("speech") is not None

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        numbers = torch.zeros(rows, len(Numbers._fields), dtype=torch.int64, device=device)
        hears = torch.zeros(rows, dtype=torch.bool, device=device)
        return {"speech": numbers, "hears": hears, "begin_unsaid": wide(rows, vocab_size, device)}

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        rules = params.extra.get("speech") or SpeechRules()
        first = rules.first_time if rules.timed else NO_TIME
        latest = NO_TIME if rules.latest_first is None else rules.first_time + rules.latest_first
        # Before the first token there is a time, as if a piece had begun.
        numbers = Numbers(0, first, first, first - 1, first, latest, rules.silent, rules.end)
        columns["speech"][row] = torch.tensor(numbers)
        columns["hears"][row] = self.active(params)
        if rules.begin_unsaid:
            columns["begin_unsaid"] = widened(columns["begin_unsaid"], vocab_size)
        columns["begin_unsaid"][row] = 0
        if rules.begin_unsaid:
            columns["begin_unsaid"][row, list(rules.begin_unsaid)] = 1

    def apply(self, scores: Tensor, columns: Columns, proposed: ProposedTokens | None) -> Tensor:
        assert proposed is not None
        own = Numbers(*columns["speech"][:, :, None].unbind(1))  # [A, 1] each
        tokens = torch.arange(scores.shape[2], device=scores.device)
        said, before, last, time = at_each_position(own, proposed, scores.shape[1])
        at_begin, before, last = said == 0, before >= own.first, last >= own.first
        in_pair = last & ~before & ~at_begin  # after the end of a piece the next one begins
        is_time = tokens >= own.first[:, :, None]  # [A, 1, V]
        lowest = torch.where(in_pair, time, time + 1)
        unsaid = is_time & ((tokens < lowest[:, :, None]) | (last & before & ~at_begin)[:, :, None])
        unsaid |= in_pair[:, :, None] & (tokens < own.end[:, :, None])
        begins = at_begin[:, :, None] & (~is_time | (tokens > own.latest[:, :, None]))
        timed = (own.first < NO_TIME)[:, :, None]
        unsaid |= timed & (begins | (tokens == own.silent[:, :, None]))
        if columns["begin_unsaid"].shape[1]:
            unsaid |= at_begin[:, :, None] & (columns["begin_unsaid"] > 0)[:, None]
        scores = scores.masked_fill(unsaid, -torch.inf)
        likely = scores.masked_fill(~is_time, -torch.inf).logsumexp(-1, keepdim=True)
        text = scores.masked_fill(is_time, -torch.inf).amax(-1, keepdim=True)
        return scores.masked_fill(~is_time & (likely > text), -torch.inf)

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        own = Numbers(*columns["speech"].unbind(1))  # views
        said = torch.cat([own.before[:, None], own.last[:, None], tokens], 1)
        before, last = said.gather(1, accepted[:, None] + torch.arange(1, 3, device=tokens.device)).unbind(1)
        committed = torch.arange(tokens.shape[1], device=tokens.device) <= accepted[:, None]
        times = tokens.masked_fill(~committed | (tokens < own.first[:, None]), -1)
        own.time.copy_(torch.maximum(own.time, times.amax(1)))
        own.said.add_(accepted).add_(1)
        own.before.copy_(before)
        own.last.copy_(last)


def at_each_position(own: Numbers, proposed: ProposedTokens, width: int) -> tuple[Tensor, ...]:
    """Return what plain decoding would know at each position [A, W]: how much was said, the last tokens, the time."""
    tokens, nodes = proposed.tokens, proposed.nodes
    last = torch.cat([own.last, tokens], 1)  # [A, N+1], as if there were a position after each
    before = torch.cat([own.before, nodes.at_parents(last[:, :, None])[:, :, 0]], 1)
    time = nodes.highest(own.time, tokens.masked_fill(tokens < own.first, -1))
    said = own.said + nodes.places(tokens)
    return tuple(proposed.at_positions(each, width) for each in (said, before, last, time))
