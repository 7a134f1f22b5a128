"""The modules that are traced: models and heads whose cache writes are TensorScatter, their attention one ONNX node.

Traced nodes give zeros when run in torch, so these modules are for tracing only and never an oracle.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import causal_mask_function

from . import special
from .hidden_states import Features, all_features, hidden_states_of
from .repeating import each_kind_once

OPSET = 24
IMPLEMENTATION = "trt_spec"  # the name of our attention and our experts in transformers' registries


class Places(NamedTuple):
    """Where the tokens of a call stand."""

    start: Tensor  # [B], the cache row of the first
    depths: Tensor  # [B, S], the position of each from there on
    ancestors: Tensor  # [B, S, S], which of the others each sees, and itself


class ScatterCache(Cache):  # type: ignore[misc]
    """A cache whose `update` writes this call's rows at its start and returns the whole buffers."""

    def __init__(self, places: Places, keys: list[Tensor], values: list[Tensor]) -> None:
        self.layers: list[Any] = []
        self.places, self.keys, self.values = places, keys, values

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[layer] = _written(self.keys[layer], key, self.places.start)
        self.values[layer] = _written(self.values[layer], value, self.places.start)
        return self.keys[layer], self.values[layer]

    @property
    def present(self) -> list[Tensor]:
        return [tensor for pair in zip(self.keys, self.values, strict=True) for tensor in pair]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> Places:
        return self.places

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.keys[0].shape[2], 0


def _written(past: Tensor, entries: Tensor, start: Tensor) -> Tensor:
    """Write the entries of a call's tokens [B, heads, S, size] to a state, from `start` on."""
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        [past, entries, start],
        attrs={"axis": 2, "mode": "linear"},
        dtype=past.dtype,
        shape=past.shape,
        version=OPSET,
    )


def only_rows(rows: Tensor, hidden: Tensor) -> Tensor:
    """Pick some rows [B, R] of what each token of a call has [B, S, hidden]."""
    return torch.gather(hidden, 1, rows[:, :, None].expand(-1, -1, hidden.shape[2]))


class TracedModel(nn.Module):
    """`(input_ids, start, depths, ancestors, logit_rows, past_…) -> (logits, present_…)`.

    The states are the features that heads read, side by side, if there are heads; then key_0, value_0, key_1, …
    """

    def __init__(self, model: Any, positions: int, features: Mapping[str, Features]) -> None:
        super().__init__()
        self.model = model
        self.last_position = positions - 1
        self.features = nn.ModuleDict(features)

    def forward(
        self,
        input_ids: Tensor,
        start: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        logit_rows: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        # Rows in the slack have no position of their own; nobody reads them.
        positions = (start[:, None] + depths).clamp(max=self.last_position)  # [B, S]

        count = int(bool(self.features))
        older, past = past[:count], past[count:]
        cache = ScatterCache(Places(start, depths, ancestors), list(past[0::2]), list(past[1::2]))
        with hidden_states_of(self.model, len(cache.keys), noted=bool(self.features)) as hidden:
            hook = self.model.get_output_embeddings().register_forward_pre_hook(
                lambda _, inputs: only_rows(logit_rows, inputs[0])
            )
            try:
                with each_kind_once(self.model, cache.keys, cache.values):
                    logits = self.model(
                        input_ids=input_ids, position_ids=positions, cache=cache, use_cache=True
                    ).logits  # [B, R, V]
            finally:
                hook.remove()
        newer = [_written(old, all_features(self.features.values(), hidden)[:, None], start) for old in older]
        return (logits.float(), *newer, *cache.present)


class TracedHead(nn.Module):
    """`(input_ids, start, depths, ancestors, logit_rows, past_hidden, past_…) -> (logits, present_hidden, present_…)`.

    Its hidden states are of each token given, and of each made that wants logits.
    """

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        input_ids: Tensor,
        start: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        logit_rows: Tensor,
        past_hidden: Tensor,  # [B, S, hidden]
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        cache = ScatterCache(Places(start, depths, ancestors), list(past[0::2]), list(past[1::2]))
        hidden, normed = self.head(input_ids, past_hidden, start[:, None] + depths, cache)
        logits = self.head.logits(only_rows(logit_rows, normed))
        return (logits.float(), only_rows(logit_rows, hidden), *cache.present)


@contextmanager
def ready_to_trace(model: Any) -> Iterator[None]:
    """Make attention one ONNX node, run experts without a loop, and do what the family needs, until the block ends."""
    config = model.config
    attention, experts = config._attn_implementation, config._experts_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    config._experts_implementation = IMPLEMENTATION
    try:
        with special.ready_to_trace(model):
            yield
    finally:
        config._experts_implementation = experts
        model.set_attn_implementation(attention)


def seen_by(
    q_length: int,
    kv_length: int,
    q_offset: Places,
    mask_function: Callable[..., Tensor],
    **_: Any,
) -> Tensor:  # [B, 1, S, T]
    """Say what a layer sees, by its model's own rule: an attention may not be told its window, but it gets its mask.

    The rule goes by positions. Which tokens of the call itself are seen, their ancestors say.
    """
    start, depths, ancestors = q_offset
    rows = torch.arange(kv_length)
    own_rows = start[:, None] + torch.arange(q_length)  # [B, S]
    earlier = rows < start[:, None]  # [B, T]
    seen = earlier[:, None].expand(-1, q_length, -1).scatter(2, own_rows[:, None].expand(-1, q_length, -1), ancestors)
    if mask_function is causal_mask_function:
        return seen[:, None]
    own_positions = start[:, None] + depths
    positions = rows.expand(start.shape[0], -1).scatter(1, own_rows, own_positions)  # [B, T]
    return seen[:, None] & mask_function(None, None, own_positions[:, None, :, None], positions[:, None, None])


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, S, D]
    key: Tensor,  # [B, kv_heads, T, D]
    value: Tensor,  # [B, kv_heads, T, D]
    attention_mask: Tensor,  # [B, 1, S, T]
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads]
    **_: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    absorbed = getattr(module, "absorbed", None)  # of latent attention
    if absorbed is not None:
        query = absorbed.asked(query)
    attrs: dict[str, Any] = {"is_causal": 0, "scale": scale}
    if softcap is not None:
        attrs["softcap"] = softcap
    out = torch.onnx.ops.symbolic(
        "Attention",
        [query, key, value, attention_mask],
        attrs=attrs,
        dtype=query.dtype,
        shape=(*query.shape[:-1], value.shape[-1]),
        version=OPSET,
    )
    if s_aux is not None:
        out = out * _left_by_sinks(query, key, attention_mask, scale, s_aux)
    if absorbed is not None:
        out = absorbed.answered(out)
    return out.transpose(1, 2).contiguous(), None  # [B, S, heads, D]


def _left_by_sinks(query: Tensor, key: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Give the share of attention that a sink leaves to the cache rows, `[B, heads, S, 1]`.

    A sink is one more logit in the softmax with no value behind it. The node has no input for sinks, and not every
    engine gives its scores: they are computed again, in float32, since in bfloat16 a score of fifty is off by a tenth.
    """
    grouped = query.float().reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # heads that share keys as rows
    scores = torch.onnx.ops.symbolic(  # torch's own product would ask the cache for the batch
        "MatMul",
        [grouped * scale, key.float().transpose(2, 3)],
        dtype=torch.float32,
        shape=(*grouped.shape[:3], key.shape[2]),
        version=OPSET,
    )
    scores = torch.where(mask, scores.reshape(*query.shape[:3], key.shape[2]), -torch.inf)
    sink = sinks.float()[:, None, None]  # [heads, 1, 1]
    peak = torch.maximum(scores.amax(-1, keepdim=True), sink)
    total = (scores - peak).exp().sum(-1, keepdim=True)
    return (total / (total + (sink - peak).exp())).to(query.dtype)


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run every expert on every token `[N, hidden]`, and sum by the weights `[N, k]` of the chosen ones.

    Which weights a call reads must not depend on its tokens, or no engine could plan it.
    """
    share = torch.zeros(hidden.shape[0], module.num_experts, dtype=weights.dtype).scatter(1, chosen, weights)  # [N, E]

    def project(inputs: Tensor, name: str) -> Tensor:  # [E, N, …]
        matrix = getattr(module, name)
        outputs = torch.matmul(inputs, matrix if module.is_transposed else matrix.transpose(1, 2))
        return outputs + getattr(module, f"{name}_bias")[:, None] if module.has_bias else outputs

    if module.has_gate:
        inner = module._apply_gate(project(hidden[None], "gate_up_proj"))
    else:
        inner = module.act_fn(project(hidden[None], "up_proj"))
    outputs = project(inner, "down_proj")
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    return (outputs * share.T[:, :, None]).sum(0).to(hidden.dtype)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, seen_by)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
