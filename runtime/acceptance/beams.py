"""The parameters of beam search, and what they go with."""

from ...engines import RequestError
from .checks import real, require, whole
from .filters import FILTERS
from .filters.bias import Bias
from .filters.forced_end import ForcedEnd
from .filters.min_tokens import MinTokens
from .filters.temperature import Temperature
from .parameters import Parameters

MOST_BEAMS = 32
STEEPEST = 16.0  # power of a length
EARLY = (True, False, "never")
UNDERSTOOD = (Bias, ForcedEnd, MinTokens, Temperature)  # filters that a search applies itself


def check_beams(params: Parameters) -> None:
    """Refuse parameters of beam search that make no sense, and others beside it that it does not know."""
    beams = params.num_beams
    require("num_beams", beams, whole(beams, 1, MOST_BEAMS), f"a whole number from 1 to {MOST_BEAMS}")
    power, early, wanted = params.length_penalty, params.early_stopping, params.num_return_sequences
    require("length_penalty", power, real(power, -STEEPEST, STEEPEST), f"a number from {-STEEPEST:g} to {STEEPEST:g}")
    known = isinstance(early, bool) or early == "never"
    require("early_stopping", early, known, "true, false or never")
    require("num_return_sequences", wanted, whole(wanted, 1, beams), f"a whole number from 1 to num_beams, {beams}")
    if beams == 1:
        return
    others = [one for one in FILTERS if not isinstance(one, UNDERSTOOD) and one.active(params)]
    unknown = {
        "temperature": not params.greedy,
        "lenience": params.lenient,
        "stop": bool(params.stop),
        "logprobs": params.logprobs is not None,
    } | {name: True for one in others for name in one.fields}
    for name, used in unknown.items():
        if used:
            raise RequestError(f"num_beams is {beams}, but beam search goes without {name}; leave one out", name)
