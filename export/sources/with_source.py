"""An encoder–decoder of transformers as a causal model: given one source, it takes the tokens of a text alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from ..checking.oracle import computing_in_float32
from ..tracing.repeating import layer_list


@dataclass(frozen=True)
class Said:
    """The decoder's answer, named as transformers' causal models name it."""

    logits: Tensor
    cache: Cache  # of the text alone


class _Elsewhere(nn.Module):
    """Takes the place of an encoder, whose name transformers asks for."""

    def __init__(self, main_input_name: str) -> None:
        super().__init__()
        self.main_input_name = main_input_name


class WithSource(nn.Module):
    """Its encoder is a module of its own, beside it: what is traced and counted here is the decoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        encoder, decoder, said = model.get_encoder(), model.get_decoder(), model.get_output_embeddings()
        self.encoder_name = next(name for name, module in model.named_modules() if module is encoder)
        elsewhere = _Elsewhere(encoder.main_input_name)
        for module in model.modules():
            if getattr(module, "encoder", None) is encoder:
                module.encoder = elsewhere
        self._aside = [encoder, decoder, said]  # a list, so that torch does not take them for parts of this module
        self.depth = len(layer_list(decoder))
        self._hidden: Tensor | None = None  # of the source [B or 1, S, hidden]
        self._seen: Tensor | None = None  # which entries count [B, S]; None: all

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def encoder(self) -> Any:
        return self._aside[0]

    @property
    def decoder(self) -> Any:
        return self._aside[1]

    @property
    def embed_positions(self) -> Any:
        return getattr(self.decoder, "embed_positions", None)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.get_input_embeddings()  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> nn.Module:
        said: nn.Module = self._aside[2]
        return said

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)
        self.encoder.set_attn_implementation(name)

    @contextmanager
    def given(self, hidden: Tensor, seen: Tensor | None = None) -> Iterator[None]:
        """Say texts of what the encoder made of a source, until the block ends."""
        before, (self._hidden, self._seen) = (self._hidden, self._seen), (hidden, seen)
        try:
            yield
        finally:
            self._hidden, self._seen = before

    def forward(self, input_ids: Tensor, cache: Cache | None = None, **_: Any) -> Said:
        assert self._hidden is not None, "a text has a source"
        if not isinstance(cache, EncoderDecoderCache):
            cache = EncoderDecoderCache(cache or DynamicCache(), DynamicCache())
        hidden = self._hidden.expand(input_ids.shape[0], -1, -1)
        said = self.model(
            **_tokens(self.decoder, input_ids, "decoder_"),
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=self._seen,
            cache=cache,
            use_cache=True,
        )
        return Said(said.logits, cache.self_attention_cache)

    @torch.no_grad()
    def hears(self, source: Mapping[str, Tensor]) -> Tensor:
        """Return what the encoder makes of one whole source [1, S, hidden]."""
        with computing_in_float32(self.encoder):
            given = _tokens(self.encoder, source["input_ids"]) if "input_ids" in source else source
            return self.encoder(**given).last_hidden_state.float()  # type: ignore[no-any-return]

    def generate(self, input_ids: Tensor, *, attention_mask: Tensor, **settings: Any) -> Tensor:
        """Say what transformers would say of a whole source."""
        said: Tensor = GenerationMixin.generate(  # of a Whisper, too, whose own adds rules
            self.model,
            encoder_outputs=BaseModelOutput(last_hidden_state=self._hidden),
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            decoder_start_token_id=int(input_ids[0, 0]),  # else transformers puts its own before it
            **settings,
        )
        return said

    def say_something(self, hidden: Tensor, seen: Tensor | None, cache: EncoderDecoderCache) -> None:
        """Let each layer note the keys and values that it makes of a source, the same whatever the decoder says."""
        with self.given(hidden, seen):
            self(torch.zeros(hidden.shape[0], 1, dtype=torch.int64, device=hidden.device), cache)

    @torch.no_grad()
    def made_of(self, hidden: Tensor) -> list[Tensor]:
        """Return the keys and values of a whole source: those of layer 0, of layer 1, …"""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with computing_in_float32(self):
            self.say_something(hidden, None, cache)
        layers = cache.cross_attention_cache.layers
        return [part.float() for layer in layers for part in (layer.keys, layer.values)]


def _tokens(stack: Any, input_ids: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Give tokens to an encoder or a decoder, by their embeddings where it would not count padding as positions."""
    if hasattr(getattr(stack, "embed_positions", None), "create_position_ids_from_input_ids"):
        return {f"{prefix}inputs_embeds": stack.embed_tokens(input_ids)}
    return {f"{prefix}input_ids": input_ids}
