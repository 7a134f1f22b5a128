"""Read checkpoints whose weights are quantised already: what each method stores, and the numbers that it means."""

from .dequantise import Dequantised, how_quantised, rounds_activations
from .keep import Kept
from .table import METHODS

__all__ = ["METHODS", "Dequantised", "Kept", "how_quantised", "rounds_activations"]
