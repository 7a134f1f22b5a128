"""The recurrent layers of a model: their sizes, and the states that they keep."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ...engines import ROW, WINDOW, State
from .repeating import layers_of


@dataclass(frozen=True)
class Layer:
    """The sizes of a recurrent layer."""

    number: int
    channels: int  # of its convolution, or of the keys and values that it keeps without one
    taps: int
    gates: int = 0  # numbers that decide of each token how it changes the state
    state: tuple[int, ...] = ()  # heads, size of a key, size of a value; a convolution alone has none

    def states(self, dtype: str) -> list[State]:
        """Return what it keeps: its state, the last inputs of its convolution before that, and of each token since."""
        found = []
        if self.taps > 1:
            found.append(State(f"tail_{self.number}", (self.taps - 1, self.channels), dtype, ROW))
        found.append(State(f"inputs_{self.number}", (1, self.channels), dtype, WINDOW))
        if self.state:
            found.append(State(f"state_{self.number}", self.state, "float32", ROW))
        if self.gates:
            found.append(State(f"gates_{self.number}", (1, self.gates), "float32", WINDOW))
        return found


def layer_of(module: nn.Module) -> Layer | None:
    """Read the sizes of a recurrent layer; None for another module."""
    each: Any = module
    if hasattr(module, "slope_rate"):  # a constant decay of each head
        heads, size = each.num_attention_heads, each.head_dim
        return Layer(each.layer_idx, 2 * heads * size, 1, state=(heads, size, size))
    convolution = next((one for one in module.children() if isinstance(one, nn.Conv1d)), None)
    if convolution is None or not hasattr(module, "layer_idx"):
        return None
    layer = Layer(each.layer_idx, convolution.in_channels, convolution.kernel_size[0])
    if hasattr(module, "num_v_heads"):
        state = (each.num_v_heads, each.head_k_dim, each.head_v_dim)
        return replace(layer, gates=2 * each.num_v_heads, state=state)
    if hasattr(module, "forget_gate"):  # a decay of each channel of the keys
        state = (each.num_heads, each.head_dim, each.head_dim)
        return replace(layer, gates=each.num_heads * (each.head_dim + 1), state=state)
    if hasattr(module, "ssm_state_size"):
        state = (each.num_heads, each.ssm_state_size, each.head_dim)
        return replace(layer, gates=each.num_heads, state=state)
    return layer


def layers_in(config: Any) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """Return the recurrent layers of a model with this configuration, and which layers have keys and values."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = (layer_of(module) for module in model.modules())
    keeping = ("k_proj", "expand_kv")  # keys and values, or latents
    attend = [
        place
        for place, layer in enumerate(layers_of(model, config.num_hidden_layers))
        if any(layer_of(part) is None and any(hasattr(part, name) for name in keeping) for part in layer.modules())
    ]
    return tuple(layer for layer in found if layer is not None), tuple(attend)
