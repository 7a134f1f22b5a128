"""NVIDIA's Model Optimizer: FP8 with a scale for a matrix, or NVFP4."""

from torch import Tensor

from ...engines import ExportError
from . import fp8, nvfp4
from .method import Centred, Method, Parts, Settings

FACTOR = ".weight_scale_2"
WORDS = {"FP8": "8 bits (E4M3)", "NVFP4": nvfp4.WORDS, "W4A16_NVFP4": nvfp4.WORDS}


def matrix(parts: Parts, settings: Settings) -> Tensor:
    if FACTOR in parts:
        return nvfp4.matrix(parts[".weight"], parts[".weight_scale"], parts[FACTOR])
    return fp8.matrix(parts, {})


def centred(parts: Parts, settings: Settings) -> Centred | None:
    if FACTOR in parts:
        return nvfp4.centred(parts[".weight"], parts[".weight_scale"], parts[FACTOR])
    return fp8.centred(parts, {})


def words(settings: Settings) -> str:
    algorithm = settings.get("quant_algo")
    if algorithm not in WORDS:
        raise ExportError(f"quant_algo is {algorithm!r}, expected {', '.join(WORDS)}")
    return WORDS[algorithm]


MODELOPT = Method(
    needs=(frozenset({".weight", ".weight_scale", FACTOR}), frozenset({".weight", ".weight_scale"})),
    may_have=fp8.OF_ACTIVATIONS,
    matrix=matrix,
    words=words,
    centred=centred,
)
