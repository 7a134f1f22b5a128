"""Which values of several factors meet: a Latin square or each pair, not all combinations of all."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
from allpairspy import AllPairs

BATCHES = (4, 1)
LENGTHS = (1, 2, 4, 8, 16)


class Run(NamedTuple):
    batch: int
    drafter: str
    draft_length: int
    prompts: range  # their numbers


def in_a_square(prompts: int, drafters: Sequence[str]) -> Iterator[Run]:
    """Each prompt once with each drafter in each batch, every time with another length; as often with each of them."""
    assert len(drafters) * len(BATCHES) <= len(LENGTHS), "else a prompt has a length twice"
    for place, (batch, drafter) in enumerate(product(BATCHES, drafters)):
        for first in range(len(LENGTHS)):
            yield Run(batch, drafter, LENGTHS[(first + place) % len(LENGTHS)], range(first, prompts, len(LENGTHS)))


def in_pairs(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by so few cases that each value of a factor meets each of every other."""
    return pytest.mark.parametrize(tuple(factors), [tuple(case) for case in AllPairs([*factors.values()])])
