"""How far a head agrees with its target on running text: their overlap at temperature 1, Σ min(p, q)."""

from typing import Any

import torch

from ..checking.oracle import computing_in_float32, hidden_states
from ..checking.quality import Sample
from ..tracing.hidden_states import Features

WINDOW = 256  # tokens of the sample that are read together


@torch.no_grad()
def measured(head: Any, features: Features, target: Any, sample: Sample) -> list[float]:
    """Return the overlap at each of a head's places."""
    found, count = [0.0] * head.measured_places, 0
    for begin in range(0, len(sample.tokens) - head.measured_places - 1, WINDOW):
        window = torch.tensor(sample.tokens[begin : begin + WINDOW])
        states, logits = hidden_states(target, window[None])
        distribution = logits[0, :, : sample.vocab_size].softmax(-1)
        with computing_in_float32(head):
            for place, (after, said) in enumerate(head.says(window, features(states)[0])):
                found[place] += float(
                    torch.minimum(distribution[after], said[:, : sample.vocab_size].softmax(-1)).sum()
                )
                count += 0 if place else len(after)
    return [share / max(count, 1) for share in found]
