"""Against an enumeration of all that may be drawn, and against greedy choices counted one by one."""

import pytest
import torch
from trt_spec.export.checking.quality import overlap
from trt_spec.tools.measuring.sibling_acceptance import sibling_acceptance

P, Q = [0.5, 0.2, 0.2, 0.1], [0.1, 0.4, 0.2, 0.3]


def enumerated(p: list[float], q: list[float], most: int) -> list[float]:
    """The chance that proposal 0, 1, …, drawn one after another without replacement, is the first to stand."""
    if most < 0:
        return []
    stands, later = 0.0, [0.0] * most
    residual = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    for token, share in enumerate(q):
        accepted = min(1.0, p[token] / share) if share else 1.0
        stands += share * accepted
        fallen = share * (1 - accepted)
        if fallen and sum(residual) and most:
            without = [0.0 if other == token else weight for other, weight in enumerate(q)]
            distributions = [
                [weight / sum(distribution) for weight in distribution] for distribution in (residual, without)
            ]
            later = [a + fallen * b for a, b in zip(later, enumerated(*distributions, most - 1), strict=True)]
    return [stands, *later]


def logits(weights: list[float]) -> torch.Tensor:
    return torch.tensor(weights).log().expand(2000, -1)


@pytest.mark.parametrize(("p", "q"), [(P, Q), (Q, P)])
def test_siblings_stand_as_often_as_all_that_may_be_drawn_says(p: list[float], q: list[float]):
    first, *others = enumerated(p, q, 3)
    assert overlap(logits(p), logits(q), 1.0) == pytest.approx(first)
    assert sibling_acceptance(logits(p), logits(q), 1.0) == pytest.approx(others, abs=0.005)
    assert sum(others) > 0.2, "else the test sees nothing"


def test_a_draft_that_is_the_target_needs_no_siblings():
    assert sibling_acceptance(logits(P), logits(P), 1.0) == pytest.approx([0, 0, 0], abs=1e-9)
    assert sibling_acceptance(logits(P), logits(P), 0) == [0, 0, 0]


def test_at_zero_the_targets_choice_is_looked_for_among_the_drafts_next_best():
    target = torch.eye(4)  # position i prefers token i
    draft = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(4, -1)
    assert sibling_acceptance(target, draft, 0) == [0.25, 0.25, 0.25]
    assert sibling_acceptance(target, draft, 0, most=1) == [0.25]
