"""How often the proposals of a head would be accepted on held-out text, place by place, beside a counted bigram's."""

from typing import Any

import torch
from torch import Tensor, nn

from .lesson import Lesson
from .spoken import Rows, Spoken

PLACES = 4  # of a round
MEASURED = 32  # held-out rows
AT_ONCE = 4


def measured_rows(spoken: Spoken) -> Tensor:
    return spoken.held_out[:MEASURED]


@torch.no_grad()
def by_place(lesson: Lesson[Any], head: nn.Module, spoken: Spoken) -> dict[str, list[float]]:
    """Measure mean Σ min(p, q) at temperature 1, and how often both think the same token likeliest."""
    overlap, greedy, tokens = (torch.zeros(PLACES, dtype=torch.float64) for _ in range(3))
    for chosen in torch.split(measured_rows(spoken), AT_ONCE):
        rows = spoken.rows(chosen)
        distributions = _distributions(lesson, rows)
        for place, (whose, logits) in enumerate(lesson.distributions(head, rows, PLACES)):
            p, q = distributions[:, whose], logits.softmax(-1)
            overlap[place] += float(torch.minimum(p, q).sum())
            greedy[place] += float((p.argmax(-1) == q.argmax(-1)).sum())
            tokens[place] += p[..., 0].numel()
    said = tokens > 0  # there may be fewer places
    return {"overlap": _rounded((overlap / tokens)[said]), "greedy": _rounded((greedy / tokens)[said])}


@torch.no_grad()
def bigram(lesson: Lesson[Any], spoken: Spoken) -> dict[str, float]:
    """The same of a bigram that is counted in what heads learn from: it says as much at each place."""
    learned = spoken.tokens(spoken.learned)
    pairs = torch.stack([learned[:, :-1].flatten(), learned[:, 1:].flatten()])
    found, often = torch.unique(pairs, dim=1, return_counts=True)  # in order of the first token
    begins = torch.searchsorted(found[0].contiguous(), torch.arange(lesson.teacher.vocab_size + 1))
    overlap = greedy = tokens = 0.0
    for chosen in torch.split(measured_rows(spoken), AT_ONCE):
        rows = spoken.rows(chosen)
        distributions = _distributions(lesson, rows)[:, :-1].flatten(0, 1).cpu()
        for token, p in zip(rows.tokens[:, :-1].flatten().tolist(), distributions, strict=True):
            after = slice(int(begins[token]), int(begins[token + 1]))
            ids, counts = found[1, after], often[after].float()
            tokens += 1
            if len(ids):
                overlap += float(torch.minimum(p[ids], counts / counts.sum()).sum())
                greedy += float(ids[counts.argmax()] == p.argmax())
    return {"overlap": round(overlap / tokens, 4), "greedy": round(greedy / tokens, 4)}


def _distributions(lesson: Lesson[Any], rows: Rows) -> Tensor:
    return lesson.teacher.logits(rows.last).softmax(-1)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
