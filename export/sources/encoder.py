"""The encoder as it is traced: from a source to the keys and values that its decoders ask of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from ...engines import SOURCE, Contract, EncoderContract
from ..families.shape import SourceShape
from ..tracing.cache import Places
from .traced import biases_of, placed, seen_of
from .with_source import WithSource


class TracedEncoder(nn.Module):
    """`(source_ids, source_length) -> (…)` or `(sound) -> (…)`: the states of each model that it feeds, in order."""

    def __init__(self, models: Sequence[WithSource]) -> None:
        super().__init__()
        self.models: Any = nn.ModuleList(models)
        _put(self, models[0].encoder_name, models[0].encoder)
        self.biases = biases_of(models[0].encoder)

    @property
    def stack(self) -> Any:
        return self.models[0].encoder

    @property
    def config(self) -> Any:
        return self.stack.config

    def get_output_embeddings(self) -> nn.Module:
        return self.models[0].get_output_embeddings()  # type: ignore[no-any-return]

    def set_attn_implementation(self, name: str) -> None:
        for model in self.models:
            model.set_attn_implementation(name)

    def forward(self, *source: Tensor) -> tuple[Tensor, ...]:
        with _all_finite():
            return self._hears(source[0]) if len(source) == 1 else self._reads(*source)

    def _hears(self, sound: Tensor) -> tuple[Tensor, ...]:
        narrow = sound.to(next(self.stack.parameters()).dtype)
        return self._fed(self.stack(input_features=narrow).last_hidden_state, None)

    def _reads(self, source_ids: Tensor, source_length: Tensor) -> tuple[Tensor, ...]:
        seen = seen_of(source_length, source_ids.shape[1])
        positions = torch.arange(source_ids.shape[1])[None]
        with placed(self.stack, self.biases, positions):
            hidden = self.stack(input_ids=source_ids, attention_mask=seen).last_hidden_state
        return self._fed(hidden, seen)

    def _fed(self, hidden: Tensor, seen: Tensor | None) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for model in self.models:
            cache = _OneToken(hidden.shape[0])
            model.say_something(hidden, seen, cache)
            found += cache.cross_attention_cache.made
        return tuple(found)


def _put(module: nn.Module, name: str, part: nn.Module) -> None:
    """Make a part of a module one, by the name that it has in its own model: adapters name its layers so."""
    *above, last = name.split(".")
    for one in above:
        module.add_module(one, nn.Module())
        module = module.get_submodule(one)
    module.add_module(last, part)


class _Yes:
    """The answer to whether numbers are finite."""

    def all(self) -> bool:
        return True


@contextmanager
def _all_finite() -> Iterator[None]:
    """Trace an encoder as it runs while its float16 does not overflow; else its layers would ask before they go on."""
    asked = torch.isfinite
    setattr(torch, "isfinite", lambda _: _Yes())  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "isfinite", asked)  # noqa: B010


class _Made(Cache):  # type: ignore[misc]
    """Notes the keys and values that each layer makes, of a call at these places."""

    def __init__(self, places: Places) -> None:
        self.layers: list[Any] = []
        self.made: list[Tensor] = []
        self.places = places

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.made += [key, value]
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> Places:
        return self.places

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class _OneToken(EncoderDecoderCache):  # type: ignore[misc]
    """The caches of a text of one token."""

    def __init__(self, batch: int) -> None:
        self.is_updated: dict[int, bool] = {}
        first = torch.zeros(batch, 1, dtype=torch.int64)
        places = Places(first[:, 0], first, torch.ones(batch, 1, 1, dtype=torch.bool), first)
        self.self_attention_cache, self.cross_attention_cache = _Made(places), _Made(places)

    def get_query_offset(self, layer_idx: int = 0) -> Places:
        return self.self_attention_cache.places


def encoder_contract(shape: SourceShape, models: Mapping[str, Contract], vocab_size: int) -> EncoderContract:
    """Return the contract of an encoder that feeds models with these contracts, whose dtypes are one."""
    feeds = {name: contract.of_kind(SOURCE) for name, contract in models.items()}
    dtype = next(iter(models.values())).dtype
    return EncoderContract(feeds, vocab_size, shape.longest, dtype, shape.sound)


def shared_encoders(models: Mapping[str, WithSource]) -> list[list[str]]:
    """Put the models together whose encoders are one: every weight of them is the same."""
    groups: list[list[str]] = []
    for name, model in models.items():
        like = next((group for group in groups if _same(models[group[0]].encoder, model.encoder)), None)
        if like is None:
            groups.append([name])
        else:
            like.append(name)
    return groups


def _same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        weight.shape == theirs[name].shape and torch.equal(weight, theirs[name]) for name, weight in ours.items()
    )
