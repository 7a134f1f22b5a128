"""Whether samples have a distribution, judged by the certificate's sequential test with few samples.

What a round commits is enumerated with an error below 1e-12 (tests/runtime/sampling); through the real Decoder only the
wiring is left to show. A sound one fails one in a million times over the choice of the seeds (FALSE_ALARM); the seeds
are fixed, so a test that passed keeps passing. A fault that moves TOTAL_VARIATION of the probability between the cells
is caught with probability POWER. Cells are the likely outcomes, and what is left after each likely beginning; what
cannot be is never in one of them, and a single one of it fails.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping

from trt_spec.tools.certificate.sequential import SequentialTest

FALSE_ALARM, TOTAL_VARIATION, POWER = 1e-6, 0.1, 0.99
LIKELY = 0.005
IMPOSSIBLE = "impossible"

Tokens = tuple[int, ...]
Joint = Mapping[Tokens, float]  # the probability of each outcome


def cells_of(joint: Joint) -> Callable[[Tokens], Hashable]:
    """Say of an outcome in which cell it is: its longest likely beginning, which may be all of it."""
    shares: Counter[Tokens] = Counter()
    for tokens, share in joint.items():
        for length in range(len(tokens) + 1):
            shares[tokens[:length]] += share

    def cell(tokens: Tokens) -> Hashable:
        if not joint.get(tokens):
            return IMPOSSIBLE
        return next(tokens[:length] for length in range(len(tokens), -1, -1) if shares[tokens[:length]] >= LIKELY)

    return cell


def is_distributed_as(
    joint: Joint, sample: Callable[[range], Iterable[Tokens]], total_variation: float = TOTAL_VARIATION
) -> bool:
    """Whether the outcomes that `sample` gives for each seed of a range have this distribution."""
    cell, expected = cells_of(joint), Counter({IMPOSSIBLE: 0.0})
    for tokens, share in joint.items():
        expected[cell(tokens)] += share
    test, observed = SequentialTest(expected, FALSE_ALARM, total_variation, POWER), Counter()
    for look, number in enumerate(test.looks):
        observed.update(cell(tokens) for tokens in sample(range(observed.total(), number)))
        if (passed := test.passes(observed, look)) is not None:
            break
    print(test.numbers(observed))
    return passed
