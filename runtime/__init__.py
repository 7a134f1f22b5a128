"""The speculation loop over a bundle: everything a service embeds."""

from ..engines import (
    BundleError,
    ContractError,
    EngineError,
    PairError,
    RequestError,
    TrtSpecError,
)
from .acceptance.params import SamplingParams
from .decoder import Decoder
from .grammars.grammar import Grammar
from .requests.metrics import Speculation
from .requests.output import BeamText, Output, Piece, TokenLogprob, TracedRound, TracedSibling, Usage
from .requests.request import Request
from .state.asked import EntropyRule
from .state.shapes import Shape

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
