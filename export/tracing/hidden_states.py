"""The hidden states of a target while it runs, and the features that a head makes of some of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .repeating import layers_of

LAST = -1  # names the last hidden state, as the last norm gives it


class Features(nn.Module):
    """The features that a head reads of each token: its encoder over some of the target's hidden states."""

    def __init__(self, encoder: nn.Module, layers: Sequence[int]) -> None:
        super().__init__()
        self.encoder, self.layers = encoder, tuple(layers)

    def forward(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Encode hidden states [B, S, …], known by what transformers numbers them, as features [B, S, size]."""
        features: Tensor = self.encoder([hidden[layer] for layer in self.layers])
        return features


class Last(nn.Module):
    """The features of a token that are its hidden state as it is."""

    def forward(self, hidden: Sequence[Tensor]) -> Tensor:
        [one] = hidden
        return one


NO_FEATURES: Mapping[str, Features] = {}


def all_features(features: Iterable[nn.Module], hidden: Mapping[int, Tensor]) -> Tensor:
    """Return what all heads read [B, S, size], side by side in the order of the heads."""
    return torch.cat([one(hidden) for one in features], -1)


@contextmanager
def hidden_states_of(model: Any, count: int, noted: bool) -> Iterator[dict[int, Tensor]]:
    """Note the hidden states of a model of so many layers in its next call, if they are to be `noted`.

    State i is what layer i reads, as in transformers' `hidden_states`.
    """
    found: dict[int, Tensor] = {}

    def note(number: int, value: Any) -> None:
        found[number] = value[0] if isinstance(value, tuple) else value

    if not noted:  # by most models, of which some are built in odd ways
        yield found
        return
    layers = layers_of(model, count)
    hooks = [layers[0].register_forward_pre_hook(lambda _, inputs: note(0, inputs[0]))]
    hooks += [
        layer.register_forward_hook(lambda _, __, output, number=number: note(number, output))
        for number, layer in enumerate(layers[:-1], 1)
    ]
    projection = model.get_output_embeddings()
    hooks.append(projection.register_forward_pre_hook(lambda _, inputs: note(LAST, inputs[0])))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
