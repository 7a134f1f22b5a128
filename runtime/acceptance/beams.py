"""What the parameters of beam search go with."""

from .filters import FILTERS
from .filters.bias import Bias
from .filters.forced_end import ForcedEnd
from .filters.min_tokens import MinTokens
from .filters.temperature import Temperature
from .parameter_fields import ParameterFields
from .ranges import refuse_beside_beams

UNDERSTOOD = (Bias, ForcedEnd, MinTokens, Temperature)  # filters that a search applies itself


def refuse_filters_beside_beams(params: ParameterFields) -> None:
    """Refuse filters that a search would have to apply, and does not."""
    if params.num_beams == 1:
        return
    others = [one for one in FILTERS if not isinstance(one, UNDERSTOOD) and one.active(params)]
    refuse_beside_beams(params, [name for one in others for name in one.fields])
