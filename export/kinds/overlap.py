"""How far a head agrees with its target on running text: the overlap of their laws at temperature 1, Σ min(p, q)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..checking.oracle import computing_in_float32, hidden_states
from ..checking.quality import Sample

WINDOW = 256  # tokens of the sample that are read together

# From a window [L] and the target's hidden states [1, L, …] by number: for each place of the head, the tokens [N] after
# which the target says the same, and the head's logits [N, V].
Says = Callable[[Tensor, dict[int, Tensor]], Iterable[tuple[Tensor, Tensor]]]


@torch.no_grad()
def overlaps(head: Any, places: int, says: Says, target: Any, sample: Sample) -> list[float]:
    """Return the overlap at each of a head's places."""
    found, count = [0.0] * places, 0
    for begin in range(0, len(sample.tokens) - places - 1, WINDOW):
        window = torch.tensor(sample.tokens[begin : begin + WINDOW])
        states, logits = hidden_states(target, window[None])
        law = logits[0, :, : sample.vocab_size].softmax(-1)
        with computing_in_float32(head):
            for place, (after, said) in enumerate(says(window, states)):
                found[place] += float(torch.minimum(law[after], said[:, : sample.vocab_size].softmax(-1)).sum())
                count += 0 if place else len(after)
    return [share / max(count, 1) for share in found]
