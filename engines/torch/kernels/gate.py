"""SiLU or GELU of one tensor times another."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .declare import declare


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _shape(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


_gated = declare("gate", "(Tensor gate, Tensor up, str activation) -> Tensor", _shape, gated)


def gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    whole = gate.shape == up.shape and gate.dtype == up.dtype  # else torch makes the two alike
    found: Tensor = (_gated if whole else gated)(gate, up, activation)
    return found
