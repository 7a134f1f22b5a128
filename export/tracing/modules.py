"""The modules that are traced: models and heads whose cache writes are TensorScatter, their attention one ONNX node.

Traced nodes give zeros when run in torch, so these modules are for tracing only and never an oracle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...engines import FEATURES
from .cache import OPSET, BothWays, Places, ScatterCache, by_layer, written
from .entries import Entries
from .hidden_states import Features, all_features, hidden_states_of
from .recurrent import RecurrentCache, computed_by
from .repeating import depth_of, each_kind_once

IMPLEMENTATION = "trt_spec"  # the name of our attention and our experts in transformers' registries


def only_rows(rows: Tensor, hidden: Tensor) -> Tensor:
    """Pick some rows [B, R] of what each token of a call has [B, S, hidden]."""
    return torch.gather(hidden, 1, rows[:, :, None].expand(-1, -1, hidden.shape[2]))


class TracedModel(nn.Module):
    """`(input_ids, start, depths, ancestors, logit_rows, past_…) -> (logits, present_…)`.

    `names` are those of the states, in their order. One of them may be the features that heads read, side by side.
    """

    def __init__(self, model: Any, positions: int, features: Mapping[str, Features], names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.last_position, self.names = model, positions - 1, names
        self.features = nn.ModuleDict(features)

    def forward(
        self, input_ids: Tensor, start: Tensor, depths: Tensor, ancestors: Tensor, logit_rows: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache = ScatterCache(Places.of(start, depths, ancestors), dict(zip(self.names, past, strict=True)))
        return self.said(input_ids, logit_rows, cache)

    def said(self, input_ids: Tensor, logit_rows: Tensor, cache: ScatterCache) -> tuple[Tensor, ...]:
        start, depths, *_ = cache.places
        # Rows in the slack have no position of their own; nobody reads them.
        positions = (start[:, None] + depths).clamp(max=self.last_position)  # [B, S]
        depth = depth_of(self.model)
        with hidden_states_of(self.model, depth, noted=bool(self.features)) as hidden:
            hook = self.model.get_output_embeddings().register_forward_pre_hook(
                lambda _, inputs: only_rows(logit_rows, inputs[0])
            )
            try:
                with each_kind_once(self.model, depth, cache.kept):
                    logits = self.model(
                        input_ids=input_ids, position_ids=positions, cache=cache, use_cache=True
                    ).logits  # [B, R, V]
            finally:
                hook.remove()
        if self.features:
            found = all_features(self.features.values(), hidden)[:, None]
            cache.kept[FEATURES] = written(cache.kept[FEATURES], found, start)
        return (logits.float(), *cache.kept.values())


class TracedRecurrent(TracedModel):
    """Some layers are recurrent, so that `pending, count, fold, slot` come before the states."""

    def forward(  # type: ignore[override]  # torch.export names inputs by it, and four come before the states
        self,
        input_ids: Tensor,
        start: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        logit_rows: Tensor,
        pending: Tensor,
        count: Tensor,
        fold: Tensor,
        slot: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        places, kept = Places(start, depths, ancestors, depths), dict(zip(self.names, past, strict=True))
        cache = RecurrentCache(places, Entries(places, pending, count, fold, slot), kept)
        with computed_by(self.model, cache):
            return self.said(input_ids, logit_rows, cache)


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
        cache = ScatterCache(Places(start, depths, ancestors, depths), by_layer(past))
        hidden, normed = self.head(input_ids, past_hidden, start[:, None] + depths, cache)
        logits = self.head.logits(only_rows(logit_rows, normed))
        return (logits.float(), only_rows(logit_rows, hidden), *cache.kept.values())


@contextmanager
def as_nodes(model: Any) -> Iterator[None]:
    """Make attention one ONNX node and run experts without a loop, until the block ends."""
    config = model.config
    attention, experts = config._attn_implementation, config._experts_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    config._experts_implementation = IMPLEMENTATION
    try:
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
    """Say what a layer sees, by its model's own rule: an attention may not know its window, but it gets its mask.

    The rule goes by positions. Which tokens of the call are seen, and of the tail before it, their ancestors say.
    """
    start, depths, ancestors = q_offset[:3]
    rows = torch.arange(kv_length)
    earlier = rows < start[:, None]  # [B, T]
    own = q_offset.rows[:, None].expand(-1, q_length, -1)  # [B, S, W]
    seen = earlier[:, None].expand(-1, q_length, -1).scatter(2, own, ancestors)
    if mask_function is causal_mask_function:
        return seen[:, None]
    own_positions = start[:, None] + depths
    positions = positions_of_entries(q_offset, kv_length)
    own_positions, positions = own_positions[:, None, :, None], positions[:, None, None]
    allowed = mask_function(None, None, own_positions, positions)
    if isinstance(q_offset, BothWays):
        allowed = allowed | (positions > own_positions)  # which is seen of one image alone
    return seen[:, None] & allowed


def _seen(
    q_length: int,
    kv_length: int,
    q_offset: Any,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,  # [B, T], of sources of unlike lengths
    **_: Any,
) -> Tensor | None:  # [B, 1, S, T]; None: all
    """Say what a layer sees, of a source all that it has."""
    if mask_function is not bidirectional_mask_function:
        return seen_by(q_length, kv_length, q_offset, mask_function)
    return None if attention_mask is None else attention_mask[:, None, None].expand(-1, -1, q_length, -1)


def positions_of_entries(places: Places, entries: int) -> Tensor:
    """Return the position of each entry [B, T], those that a call names among them."""
    start = places.start
    return torch.arange(entries).expand(start.shape[0], -1).scatter(1, places.rows, start[:, None] + places.tail)


def attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, S, D]
    key: Tensor,  # [B, kv_heads, T, D]
    value: Tensor,  # [B, kv_heads, T, D]
    attention_mask: Tensor | None,  # [B, 1, S, T]; None: all is seen
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads]
    position_bias: Tensor | None = None,  # [B or 1, heads, S, T]
    **_: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    absorbed = getattr(module, "absorbed", None)  # of latent attention
    if absorbed is not None:
        query = absorbed.asked(query)
    attrs: dict[str, Any] = {"is_causal": 0, "scale": scale}
    if softcap is not None:
        attrs["softcap"] = softcap
    mask = attention_mask
    if position_bias is not None and not getattr(module, "unbiased", False):
        mask = position_bias if mask is None else torch.where(mask, position_bias, -torch.inf)
    out = torch.onnx.ops.symbolic(
        "Attention",
        [query, key, value, *([] if mask is None else [mask])],
        attrs=attrs,
        dtype=query.dtype,
        shape=(*query.shape[:-1], value.shape[-1]),
        version=OPSET,
    )
    if s_aux is not None:
        assert attention_mask is not None
        out = out * _left_by_sinks(query, key, attention_mask, scale, s_aux)
    if absorbed is not None:
        out = absorbed.answered(out)
    return out.transpose(1, 2).contiguous(), None  # [B, S, heads, D]


def _left_by_sinks(query: Tensor, key: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Give the share of attention that a sink leaves to the cache rows, `[B, heads, S, 1]`.

    A sink is one more logit in the softmax that has no value. The node has no input for sinks, and not every
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


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, _seen)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
