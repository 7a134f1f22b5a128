"""An arbiter of a pair says whether two texts part at a near tie."""

from trt_spec.engines import Bundle
from trt_spec.tools.certificate.arbiter import Arbiter, Logits
from trt_spec.tools.certificate.probe import Probe
from trt_spec.tools.certificate.subject import Subject

from .bundles import Pair


def arbiter_of(pair: Pair, *others: Logits) -> Arbiter:
    subject = Subject(Bundle.open(pair.bundle), "onnxruntime", "cpu", batch=4)
    return Arbiter(Probe(subject), subject.rounding, others)
