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
from .grammars.grammar import Grammar
from .lengths.entropy import EntropyRule
from .lengths.shapes import CombLength, TreeLength
from .requests.metrics import Speculation
from .requests.output import Output, Piece, TokenLogprob, TracedRound, TracedSibling, Usage
from .requests.request import Request
from .sampling.params import SamplingParams

__all__ = [
    "BundleError",
    "CombLength",
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
    "Speculation",
    "TokenLogprob",
    "TracedRound",
    "TracedSibling",
    "TreeLength",
    "TrtSpecError",
    "Usage",
]
