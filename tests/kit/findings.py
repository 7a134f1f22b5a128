"""What a check of the certificate finds of a subject."""

from collections.abc import Iterator

from trt_spec.tools.certificate import distribution, rollback, same_text, semantics
from trt_spec.tools.certificate.effort import QUICK, Effort
from trt_spec.tools.certificate.probe import Probes
from trt_spec.tools.certificate.subject import Finding, Subject

CHECKS = {
    "distribution": distribution.check,
    "same text": same_text.check,
    "rollback": rollback.check,
    "semantics": semantics.check,
}


def findings(check: str, subject: Subject, effort: Effort = QUICK) -> Iterator[Finding]:
    with Probes(subject) as probes:
        yield from CHECKS[check](subject, probes, effort, lambda stage, done, total: None)
