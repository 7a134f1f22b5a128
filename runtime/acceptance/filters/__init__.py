"""The filters of a request, one per file, in the order in which they change its distribution."""

from .bias import Bias
from .filter import Change, Cut, Filter, cut_below
from .forced_end import ForcedEnd
from .grammar import Allowed
from .min_p import MinP
from .min_tokens import MinTokens
from .penalties import Penalties
from .speech import Speech, SpeechRules
from .temperature import Temperature
from .top_k import TopK
from .top_p import TopP

TEMPERATURE = Temperature()
FILTERS: list[Filter] = [Allowed(), Bias(), MinTokens(), Penalties(), Speech(), ForcedEnd()]  # of scores as they are
FILTERS += [TEMPERATURE, TopK(), TopP(), MinP()]

__all__ = ["FILTERS", "TEMPERATURE", "Change", "Cut", "Filter", "SpeechRules", "cut_below"]
