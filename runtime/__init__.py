"""The speculation loop over a bundle: everything a service embeds."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engines import BundleError, ContractError, EngineError, PairError, RequestError, TrtSpecError
    from .acceptance.sampling_params import SamplingParams
    from .decoder import Decoder
    from .grammars.grammar import Grammar
    from .requests.metrics import Speculation
    from .requests.output import BeamText, Output, Piece, TokenLogprob, TracedRound, TracedSibling, Usage
    from .requests.request import Request
    from .state.asked import EntropyRule
    from .state.shapes import Shape

_PLACES = {
    "..engines": ("BundleError", "ContractError", "EngineError", "PairError", "RequestError", "TrtSpecError"),
    ".acceptance.sampling_params": ("SamplingParams",),
    ".decoder": ("Decoder",),
    ".grammars.grammar": ("Grammar",),
    ".requests.metrics": ("Speculation",),
    ".requests.output": ("BeamText", "Output", "Piece", "TokenLogprob", "TracedRound", "TracedSibling", "Usage"),
    ".requests.request": ("Request",),
    ".state.asked": ("EntropyRule",),
    ".state.shapes": ("Shape",),
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "BeamText",
    "BundleError",
    "ContractError",
    "Decoder",
    "EngineError",
    "EntropyRule",
    "Grammar",
    "Output",
    "PairError",
    "Piece",
    "Request",
    "RequestError",
    "SamplingParams",
    "Shape",
    "Speculation",
    "TokenLogprob",
    "TracedRound",
    "TracedSibling",
    "TrtSpecError",
    "Usage",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for, and torch only with what computes: flags are read and refused without it."""
    if name not in _PLACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACE[name], __name__), name)
