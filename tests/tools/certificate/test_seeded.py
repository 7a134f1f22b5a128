"""Where seeds decide the tokens a few samples are as good as thousands."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from trt_spec.runtime.state.asked import BESIDE
from trt_spec.tools.certificate import distribution, seeded
from trt_spec.tools.certificate.effort import POWER, QUICK
from trt_spec.tools.certificate.first_tokens import Case, remembering
from trt_spec.tools.certificate.probe import Probes
from trt_spec.tools.certificate.subject import Finding, Subject

from ...kit.bundles import Pair
from ...kit.faults import fault


def test_so_many_samples_hold_one_that_differs_with_the_stated_power():
    for share, power in ((0.05, 0.99), (0.2, 0.99), (0.02, 0.5)):
        samples = seeded.samples_needed(share, power)
        assert 1 - (1 - share) ** samples >= power > 1 - (1 - share) ** (samples - 1)


def test_trees_under_the_coupled_rule_are_decided_by_seeds_and_nothing_else_is():
    line = Case("T 0.5", "coupled", "model", 3, (1,))
    tree = replace(line, drafter=f"model{BESIDE}lookup")
    assert not seeded.decided_by_seeds(line), "one stays that shows by χ² that the noise is sound"
    assert seeded.decided_by_seeds(tree)
    assert not any(seeded.decided_by_seeds(replace(tree, rule=rule)) for rule in ("rejection", "tokenwise"))


def findings(subject: Subject) -> list[Finding]:
    """Of all that seeds decide."""
    with Probes(subject) as probes, subject.open() as decoder:
        logits = remembering(probes["target"])
        cases = filter(seeded.decided_by_seeds, distribution.list_cases(subject, decoder, logits, each_tree=True))
        judge = distribution.Arbiter(probes["target"], subject.rounding)
        samples = seeded.samples_needed(QUICK.total_variation, POWER)
        return [seeded.compare(decoder, case, samples, logits, judge) for case in cases]


def test_each_sample_is_what_its_seed_says(llama: Pair, subject_of: Callable[..., Subject]):
    found = findings(subject_of(llama, batch=32))
    assert len(found) > 6
    assert all(one.passed for one in found)
    assert found[0].detail == "21 samples, each what its seed says"


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("noise of nodes, not of indices", "+"),
        ("sibling seen by a sibling", "K 3+3"),
        ("line seen by another", BESIDE),
        ("positions by column", "K 3+3"),
    ],
)
def test_a_fault_of_trees_makes_samples_other_than_their_seeds_say(
    llama: Pair, subject_of: Callable[..., Subject], name: str, where: str
):
    with fault(name):
        failed = [one for one in findings(subject_of(llama, batch=32)) if not one.passed]
    assert any(where in one.case for one in failed)
    assert "of 21 samples are not what their seeds say: bug at " in failed[0].detail
