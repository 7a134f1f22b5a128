"""A random target and a random draft over four tokens, each with a distribution of its own after every prefix."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

V = 4
EXACT = 1e-12


Distribution = dict[tuple[int, ...], Tensor]  # of the next token, after each prefix


class Models(NamedTuple):
    """The distributions of target and draft after each prefix of 0 … K tokens."""

    p: Distribution
    q: Distribution

    def target_after(self, tokens: tuple[int, ...], until: int) -> Tensor:
        """The joint of the tokens that follow, as many as make `until`."""
        if len(tokens) == until:
            return torch.ones((), dtype=torch.float64)
        each = [
            share * self.target_after((*tokens, token), until)
            for token, share in enumerate(self.p[tokens].double().tolist())
        ]
        return torch.stack(each)


def mass_of(distribution: Distribution, tokens: tuple[int, ...]) -> float:
    return prod(distribution[tokens[:i]][token].item() for i, token in enumerate(tokens))


def random_models(seed: int, k: int, dtype: torch.dtype, spread: float = 1.5) -> Models:
    generator = torch.Generator().manual_seed(seed)
    p, q = {}, {}
    for length in range(k + 1):
        for prefix in product(range(V), repeat=length):
            for distribution, scale in ((p, spread), (q, 1.0)):
                logits = scale * torch.randn(V, generator=generator, dtype=torch.float64)
                distribution[prefix] = logits.to(dtype).softmax(-1)
    return Models(p, q)


def with_exclusions(models: Models) -> Models:
    """Filters leave tokens out, of target and draft not always the same; token 1 always stays."""
    p = {prefix: keep(distribution, (0, 1) if sum(prefix) % 2 else (1, 2)) for prefix, distribution in models.p.items()}
    q = {
        prefix: keep(distribution, (1, 2) if len(prefix) % 2 else (0, 1, 2))
        for prefix, distribution in models.q.items()
    }
    return Models(p, q)


def keep(distribution: Tensor, tokens: Sequence[int]) -> Tensor:
    kept = torch.zeros_like(distribution)
    kept[list(tokens)] = distribution[list(tokens)]
    return kept / kept.sum()


def excess(target: Distribution, joint: Tensor, lenience: float) -> float:
    """By how much a token of the joint is likelier after what precedes it than 1 / lenience times the target's own."""
    found = []
    for prefix, p in target.items():
        own = joint.view(V ** len(prefix), V, -1).sum(2)[sum(V**i * token for i, token in enumerate(reversed(prefix)))]
        found.append((own - own.sum() * p / lenience).max().item())
    return max(found)


def verdicts(first: float, chance: Sequence[float]) -> Iterator[tuple[float, list[float]]]:
    """How likely it is that tokens pass or fail, in each way, by uniforms up to these, and uniforms for each."""
    for passes in product((True, False), repeat=len(chance)):
        mass = first * prod(h if stands else 1 - h for h, stands in zip(chance, passes, strict=True))
        if mass > 0:
            yield mass, [h / 2 if stands else (1 + h) / 2 for h, stands in zip(chance, passes, strict=True)]
