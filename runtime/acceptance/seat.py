"""Enters the parameters of requests into rows, which every filter reads in columns of its own."""

from collections.abc import Sequence

import torch

from ..grammars.guide import Guide
from ..state.rows import Columns, Rows
from .filters import FILTERS
from .sampling_params import SamplingParams

LEAST_LENIENCE = 1e-30  # its logarithm is finite, so that what a request excludes stays excluded


def make_rows(rows: int, length: int, vocab_size: int, drafters: int, device: str, copied: int = 0) -> Rows:
    """Make empty rows for up to `length` tokens and `copied` ones of a source, with the columns of all filters."""
    columns: Columns = {}
    for one in FILTERS:
        columns |= one.columns(rows, vocab_size, device)
    return Rows.allocate(rows, length, drafters, device, columns, copied)


def admit(rows: Rows, row: int, prompt: Sequence[int], params: SamplingParams, seed: int, vocab_size: int) -> None:
    """Begin a request in a row."""
    rows.tokens[row, : len(prompt)] = torch.tensor(prompt)
    rows.length[row] = len(prompt)
    rows.begins[row] = 0  # no branches yet
    rows.coupled[row] = params.test == "coupled"
    rows.rejection[row] = params.test == "rejection"
    rows.seed[row] = torch.tensor([seed & 0xFFFFFFFF, seed >> 32])
    rows.noise_scale[row] = 0.0 if params.greedy else 1.0
    rows.lenience[row] = max(params.lenience, LEAST_LENIENCE)
    for one in FILTERS:
        one.admit(rows.columns, row, params, prompt, vocab_size)


def resume(rows: Rows, row: int, params: SamplingParams, output: Sequence[int]) -> None:
    """Go on with a request that was admitted again: these tokens are its output so far."""
    start, tokens = int(rows.length[row]), torch.tensor([output], device=rows.length.device)
    rows.tokens[row, start : start + len(output)] = tokens[0]
    rows.length[row] += len(output)
    last = torch.full((1,), len(output) - 1, device=rows.length.device)
    own = {name: column[row : row + 1] for name, column in rows.columns.items()}
    for one in FILTERS:
        if one.active(params):
            one.commit(own, tokens, last)


def follow_guide(rows: Rows, row: int, guide: Guide | None) -> None:
    """Let a guide lead the request in a row."""
    rows.columns["guide"][row] = 0 if guide is None else guide.number
