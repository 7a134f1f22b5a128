"""Compute what the checkpoint itself says: with transformers' own model, attention and cache, in float32."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..tracing.hidden_states import LAST, Features, all_features

# Whose weights a module reads, or asks for their dtype; all feed-forward parts of T5 ask `wo`.
ASKED = {"Mamba2Block": "norm", "Mamba2ForCausalLM": "lm_head", "Gemma3nTextDecoderLayer": "altup"}


def behind_first(model: Any, sources: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Let a model that needs a source say texts behind the first."""
    return model.behind(sources[0]) if sources else nullcontext()


@torch.no_grad()
def branch_logits(model: Any, branches: list[list[int]]) -> list[Tensor]:
    """Compute the logits `[length, V]` of each token sequence in plain passes, without a cache."""
    found: dict[int, Tensor] = {}
    with computing_in_float32(model):
        for group in _of_like_lengths([len(branch) for branch in branches]):
            longest = len(branches[group[-1]])
            padded = torch.zeros(len(group), longest, dtype=torch.int64)  # causal: what follows a sequence is unseen
            for row, number in enumerate(group):
                padded[row, : len(branches[number])] = torch.tensor(branches[number])
            logits = model(padded, use_cache=False).logits
            found |= {number: logits[row, : len(branches[number])] for row, number in enumerate(group)}
    return [found[number] for number in range(len(branches))]


def _of_like_lengths(lengths: list[int]) -> list[list[int]]:
    """Group the numbers of these lengths, shortest first, so that none is padded by more than a third of its own."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and 3 * lengths[number] <= 4 * lengths[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


@torch.no_grad()
def branch_features(model: Any, branches: list[list[int]], features: Mapping[str, Features]) -> list[Tensor]:
    """Compute the features `[length, size]` of each token sequence that heads read; none where there are no heads."""
    found = []
    for branch in branches if features else ():
        hidden, _ = hidden_states(model, torch.tensor([branch]))
        with ExitStack() as stack:
            for one in features.values():
                stack.enter_context(computing_in_float32(one))
            found.append(all_features(features.values(), hidden)[0])
    return found


@torch.no_grad()
def hidden_states(model: Any, tokens: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Return what a model makes of token windows [B, S]: its hidden states by number, and its logits [B, S, V].

    They are transformers' own, not those that a trace notes.
    """
    with computing_in_float32(model):
        said = model(tokens, use_cache=False, output_hidden_states=True)
        read = states_read(model, tokens, said)
    numbered = {number: hidden.float() for number, hidden in enumerate(read)}
    return numbered | {LAST: read[-1].float()}, said.logits.float()


def states_read(model: Any, tokens: Tensor, said: Any) -> tuple[Tensor, ...]:
    """Return what each layer has read, and the last state, normed; Mamba-2's list begins behind its first layer."""
    listed: tuple[Tensor, ...] = said.hidden_states
    if model.config.model_type != "mamba2":
        return listed
    return (model.get_input_embeddings()(tokens), *listed[:-2], listed[-1])


@torch.no_grad()
def cached_rows(model: Any, tokens: list[int]) -> list[Tensor]:
    """Return the rows that a model caches of these tokens, in float32: key_0, value_0, key_1, …"""
    with computing_in_float32(model):
        cache = model(torch.tensor([tokens]), use_cache=True).cache
    kept = [layer for layer in cache.layers if layer.keys is not None]  # the others ask the keys of one of these
    return [rows.float() for layer in kept for rows in (layer.keys, layer.values)]


@torch.no_grad()
def continued_logits(model: Any, rows: Iterable[Tensor], tokens: list[int]) -> Tensor:
    """Compute the logits `[len(tokens), V]` after a cache that already holds these rows: key_0, value_0, key_1, …"""
    from transformers import DynamicCache

    behind = model.config.is_encoder_decoder  # whose configuration counts the encoder's layers, not the decoder's
    cache = DynamicCache(config=None if behind else model.config)
    each = iter(rows)
    for layer, (key, value) in enumerate(zip(each, each, strict=True)):
        cache.update(key, value, layer)
    with computing_in_float32(model):
        logits: Tensor = model(torch.tensor([tokens]), cache=cache, use_cache=True).logits[0]
    return logits


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Widen each layer's weights while it runs, and only then, so that a half-precision model needs no second copy.

    Those of a convolution belong to the recurrent layer around it, which reads them itself, and so do those that the
    module around them reads or asks for their dtype.
    """
    hooks = []
    for module in model.modules():
        asked = ASKED.get(type(module).__name__, "wo")
        read = [one for name, one in module.named_children() if isinstance(one, nn.Conv1d) or name == asked]
        for owner in (module, *read):
            narrow = {name: weight for name, weight in owner._parameters.items() if _is_narrow(weight)}
            if narrow:
                hooks.append(module.register_forward_pre_hook(lambda *_, owner=owner: _widen(owner)))
                hooks.append(
                    module.register_forward_hook(lambda *_, owner=owner, narrow=narrow: _restore(owner, narrow))
                )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_narrow(weight: nn.Parameter | None) -> bool:
    return weight is not None and weight.dtype in (torch.float16, torch.bfloat16)


def _widen(module: nn.Module) -> None:
    for name, weight in module._parameters.items():
        if weight is not None:
            module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)


def _restore(module: nn.Module, narrow: dict[str, nn.Parameter]) -> None:
    module._parameters.update(narrow)
