"""What the parameters of beam search go with."""

from ...engines import RequestError
from .filters import FILTERS
from .filters.bias import Bias
from .filters.forced_end import ForcedEnd
from .filters.min_tokens import MinTokens
from .filters.temperature import Temperature
from .parameter_fields import ParameterFields

UNDERSTOOD = (Bias, ForcedEnd, MinTokens, Temperature)  # filters that a search applies itself


def refuse_beside_beams(params: ParameterFields) -> None:
    """Refuse parameters beside those of beam search that it does not know."""
    beams = params.num_beams
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
