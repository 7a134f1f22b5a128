"""Recurrent layers as plain ONNX operators: linear attention over the tokens of a call, after a state of all before.

A layer's sequence is the pending tokens, which its state has not absorbed yet, then the call's own. Those may be a
tree: what others compute along a line is computed here along the ancestors of each token, by masks.

    S_i = e^{g_i} S + Σ_j e^{g_i − g_j} k_j w_jᵀ ,   o_i = S_iᵀ q_i        g: the sum of the logarithms of the decays
    w_i = β_i (v_i − (e^{g_i} S)ᵀ k_i − Σ_j e^{g_i − g_j} (k_j·k_i) w_j)   delta rule; j: the ancestors of i
    w_i = v_i                                                              without β: Mamba-2

A decay may be of a channel of the keys alone: then e^g is a factor of that channel of the k or q beside it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..passes.absorb_lines import ANSWER, DECAYS, KEYS, QUERY, RATES, VALUES
from .cache import Places, ScatterCache
from .decays import Decays
from .entries import Entries
from .marks import marked
from .recurrent_layers import layer_of

EPSILON = 1e-6  # of the norm of queries and keys


class RecurrentCache(ScatterCache):
    """A cache whose recurrent layers keep what `Layer.states` says."""

    def __init__(self, places: Places, entries: Entries, kept: dict[str, Tensor]) -> None:
        super().__init__(places, kept)
        self.entries = entries
        self.convolved: Tensor | None = None  # of all tokens [B, N, channels], by the layer that runs
        self.layer = -1

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def update_conv_state(self, inputs: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        self.layer = layer_idx
        return inputs

    def update_recurrent_state(self, state: Tensor | None, *_: Any, **__: Any) -> None:
        return None

    def convolve(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """Convolve the inputs [B, channels, S] of the own tokens; those of pending ones are noted."""
        entries, layer = self.entries, self.layer
        present, every = entries.kept(self.kept[f"inputs_{layer}"], inputs.transpose(1, 2))
        self.kept[f"inputs_{layer}"] = present
        tail = self.kept[f"tail_{layer}"]
        joined = torch.cat([tail, every], 1)  # [B, taps - 1 + N, channels]
        taps = entries.taps(weight.shape[1])  # [B, N, taps]
        channels = joined.shape[2]
        where = taps.reshape(taps.shape[0], -1)[:, :, None].expand(-1, -1, channels)
        read = torch.gather(joined, 1, where)
        read = read.view(-1, taps.shape[1], weight.shape[1], channels)  # [B, N, taps, channels]
        found = (read * weight.T).sum(2)
        if bias is not None:
            found = found + bias
        if activation is not None:
            found = functional.silu(found)
        found = found.to(inputs.dtype)  # where the weight has another
        ends = entries.tails(tail.shape[1])[:, :, None].expand(-1, -1, channels)
        self.kept[f"tail_{layer}"] = torch.gather(joined, 1, ends)
        self.convolved = found
        own: Tensor = found[:, entries.pending.shape[1] :].transpose(1, 2)
        return own

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Answer queries [B, H, S, dk] by keys and values [B, H, N, …]; return that, and the state after what folds.

        `decays` are logarithms [B, H, N, 1 or dk]; the delta rule has `rates` [B, H, N].
        """
        entries = self.entries
        query, keys, values = marked(QUERY, query), marked(KEYS, keys), marked(VALUES, values)
        decays, rates = marked(DECAYS, decays), None if rates is None else marked(RATES, rates)
        left = Decays(decays, entries.sees)
        own = entries.pending.shape[1]
        overlap, asked = left.products(query, keys)
        wanted = values
        if rates is not None:
            overlap = overlap * rates[..., None]
            wanted = rates[..., None] * (values - (left.of_state * keys) @ state)
            first, *others = entries.halves()
            number = torch.arange(overlap.shape[2])
            solved = torch.where(number == number[:, None], 1.0, 0.0) - torch.where(first, overlap, 0.0)
            for half in others:
                solved = solved - solved @ torch.where(half, overlap, 0.0) @ solved
            wanted = solved @ wanted
        answer = asked @ wanted + (left.of_state[:, :, own:] * query) @ state
        of_base, of_keys = left.at_end(entries.absorbed)
        after = of_base.transpose(2, 3) * state + (of_keys * keys).transpose(2, 3) @ wanted
        return marked(ANSWER, answer), after

    def delta_rule(
        self,
        query: Tensor,  # [B, S, key heads, dk]
        key: Tensor,
        value: Tensor,  # [B, S, heads, dv]
        g: Tensor,  # [B, S, heads], or of each channel [B, S, heads, dk]
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        layer, heads = self.layer, value.shape[2]
        gates = torch.cat([g.float().flatten(2), beta.float()], -1)
        self.kept[f"gates_{layer}"], all_gates = self.entries.kept(self.kept[f"gates_{layer}"], gates)
        decays, rates = torch.split(all_gates, [all_gates.shape[2] - heads, heads], 2)
        decays = decays.view(*decays.shape[:2], heads, -1).transpose(1, 2)  # [B, heads, N, 1 or dk]
        rates = rates.transpose(1, 2)  # [B, heads, N]
        assert self.convolved is not None
        keys, values = _split(self.convolved, query, key, value)[1:]
        queries = _by_head(query, query, heads)
        keys, values = _by_head(keys, key, heads), _by_head(values, value, heads)
        if use_qk_l2norm_in_kernel:
            queries, keys = _normed(queries), _normed(keys)
        queries = queries * query.shape[-1] ** -0.5
        answer, after = self.attend(queries, keys, values, decays, rates, self.kept[f"state_{layer}"])
        self.kept[f"state_{layer}"] = after
        return answer.transpose(1, 2).contiguous().to(query.dtype), after

    def scan(
        self,
        hidden_states: Tensor,  # [B, S, heads, dv]
        dt: Tensor,  # [B, S, heads]
        A: Tensor,  # [heads]
        B: Tensor,  # [B, S, groups, dk]
        C: Tensor,
        *_: Any,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **__: Any,
    ) -> tuple[Tensor, None]:
        layer, heads = self.layer, hidden_states.shape[2]
        self.kept[f"gates_{layer}"], steps = self.entries.kept(self.kept[f"gates_{layer}"], dt.float())
        if dt_bias is not None:
            steps = steps + dt_bias.float()
        if dt_softplus:
            steps = functional.softplus(steps)
        steps = steps.clamp(min=dt_limit[0])
        if dt_limit[1] != float("inf"):
            steps = steps.clamp(max=dt_limit[1])
        assert self.convolved is not None
        inputs, keys = _split(self.convolved, hidden_states, B, C)[:2]
        steps = steps.transpose(1, 2)  # [B, heads, N]
        queries, keys = _by_head(C, C, heads), _by_head(keys, B, heads)
        values = _by_head(inputs, hidden_states, heads) * steps[..., None]
        decays = (steps * A.float()[:, None])[..., None]
        answer, after = self.attend(queries, keys, values, decays, None, self.kept[f"state_{layer}"])
        self.kept[f"state_{layer}"] = after
        answer = answer.transpose(1, 2)
        if D is not None:
            answer = answer + D.float()[:, None] * hidden_states.float()
        return answer.contiguous(), None


def _split(joined: Tensor, *likes: Tensor) -> tuple[Tensor, ...]:
    """Split [B, N, channels] into parts as large as these [B, S, groups, size]."""
    return torch.split(joined, [like.shape[2] * like.shape[3] for like in likes], 2)


def _by_head(each: Tensor, like: Tensor, heads: int) -> Tensor:
    """Shape [B, N, groups · size] as `like` [B, S, groups, size] is; give each head its group's [B, heads, N, size]."""
    split = each.view(*each.shape[:2], *like.shape[2:]).float()
    if like.shape[2] != heads:
        split = split.repeat_interleave(heads // like.shape[2], 2)
    return split.transpose(1, 2)


def _normed(each: Tensor) -> Tensor:
    return each * torch.rsqrt((each * each).sum(-1, keepdim=True) + EPSILON)


SWAPPED: dict[str, Callable[..., Any]] = {  # functions of a family's module, by what computes it here
    "causal_conv1d_fn": RecurrentCache.convolve,
    "torch_chunk_gated_delta_rule": RecurrentCache.delta_rule,
    "chunk_kimi_delta_attention": RecurrentCache.delta_rule,
    "mamba2_chunk_scan": RecurrentCache.scan,
}


@contextmanager
def computed_by(model: nn.Module, cache: RecurrentCache) -> Iterator[None]:
    """Have the recurrent layers of a model call this cache until the block ends."""
    modules = {sys.modules[type(one).__module__] for one in model.modules() if layer_of(one) is not None}
    swapped = [(module, name) for module in modules for name in SWAPPED if hasattr(module, name)]
    before = [getattr(module, name) for module, name in swapped]
    for module, name in swapped:
        setattr(module, name, partial(SWAPPED[name], cache))
    try:
        yield
    finally:
        for (module, name), own in zip(swapped, before, strict=True):
            setattr(module, name, own)
