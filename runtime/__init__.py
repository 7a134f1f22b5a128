"""The speculation loop over a bundle: everything a service embeds."""

from ..engines import (
    BundleError,
    ContractError,
    EngineError,
    PairError,
    RequestError,
    TrtSpecError,
)
from .decoder import Decoder
from .entropy import EntropyRule
from .metrics import Speculation
from .params import SamplingParams
from .request import Output, Piece, Request, TokenLogprob, TracedRound, Usage

__all__ = [
    "BundleError",
    "ContractError",
    "Decoder",
    "EngineError",
    "EntropyRule",
    "Output",
    "PairError",
    "Piece",
    "Request",
    "RequestError",
    "SamplingParams",
    "Speculation",
    "TokenLogprob",
    "TracedRound",
    "TrtSpecError",
    "Usage",
]
