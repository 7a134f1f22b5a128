"""The target as a teacher: its hidden states, and the next token's distribution, made from the last of them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ....engines import RequestError
from ....export.checking.oracle import states_read
from ....export.checkpoints.checkpoint import Checkpoint, load_model

PROBE = 16  # tokens on which the distribution is compared with the model's own logits
ATTENTIONS = ("sdpa", "eager")  # the first that gives them


class Teacher:
    """A target that is only read."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        self.checkpoint = checkpoint
        self.model = load_model(checkpoint, "float32").to(device).requires_grad_(False)
        self.device = torch.device(device)
        self.vocab_size = self.projection.shape[0]
        self._cap = getattr(checkpoint.config, "final_logit_softcapping", None)
        if self.embedding.shape != self.projection.shape:
            raise RequestError(
                f"target {checkpoint.name} reads tokens as {list(self.embedding.shape)} and says them by "
                f"{list(self.projection.shape)}, expected one shape; choose another"
            )
        self._take_fast_attention()

    @property
    def config(self) -> Any:
        return self.checkpoint.config

    @property
    def embedding(self) -> Tensor:
        found: Tensor = self.model.get_input_embeddings().weight
        return found

    @property
    def projection(self) -> Tensor:
        found: Tensor = self.model.get_output_embeddings().weight
        return found

    def logits(self, last: Tensor) -> Tensor:
        """Return logits [..., V] of the last hidden states, normed."""
        found: Tensor = self.model.get_output_embeddings()(last)
        return found if self._cap is None else torch.tanh(found / self._cap) * self._cap

    @torch.no_grad()
    def read(self, tokens: Tensor, layers: Sequence[int], cache: Any = None) -> Tensor:
        """Return these hidden states of the tokens, and after them the last one: [B, T, layers + 1, H]."""
        said = self.model(tokens, cache=cache, use_cache=cache is not None, output_hidden_states=True)
        hidden = states_read(self.model, tokens, said)
        return torch.stack([*(hidden[layer] for layer in layers), hidden[-1]], 2)

    @torch.no_grad()
    def _take_fast_attention(self) -> None:
        """Attend by the kernel that torch has, where the logits stay what they are."""
        tokens = torch.arange(PROBE, device=self.device)[None] % self.vocab_size
        own = self.model(tokens, use_cache=False).logits
        for attention in ATTENTIONS:
            with suppress(ValueError):  # not all architectures have each
                self.model.set_attn_implementation(attention)
                found = self.logits(self.read(tokens, ())[:, :, -1])
                if torch.allclose(own, found, rtol=1e-3, atol=1e-3 * float(own.std())):
                    return
        raise RequestError(
            f"target {self.checkpoint.name} makes its logits of its last hidden state otherwise than by its vocabulary "
            f"projection, so that no head can be taught what a {self.checkpoint.architecture} says; choose another"
        )
