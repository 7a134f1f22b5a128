"""Let a draft that lacks the target's last tokens read them as nothing, and never propose them."""

from typing import Any

import torch

from ...engines import ExportError

UNKNOWN = -9984.0  # the logit of a token that a draft does not know: all types hold it, and its probability is 0


def add_unknown_tokens(model: Any, vocab_size: int) -> None:
    if getattr(model.config, "final_logit_softcapping", None):
        raise ExportError(
            "the draft lacks tokens of the target and caps its logits, so that these could not be kept out; choose "
            "another draft"
        )
    if getattr(model.config, "hidden_size_per_layer_input", None):
        raise ExportError(
            "the draft lacks tokens of the target and reads tokens in each layer, which would have nothing for these; "
            "choose another draft"
        )
    read, said = model.get_input_embeddings(), model.get_output_embeddings()
    missing = vocab_size - said.weight.shape[0]

    def longer(weight: torch.Tensor, value: float = 0.0) -> torch.nn.Parameter:
        rows = torch.full((missing, *weight.shape[1:]), value, dtype=weight.dtype)
        return torch.nn.Parameter(torch.cat([weight.detach(), rows]), requires_grad=False)

    bias = torch.zeros(said.weight.shape[0], dtype=said.weight.dtype) if said.bias is None else said.bias
    weight = longer(said.weight)  # of its own from now on, where both were one
    read.weight, said.weight, said.bias = longer(read.weight), weight, longer(bias, UNKNOWN)
    read.num_embeddings, said.out_features = vocab_size, vocab_size
    model.config.vocab_size, model.config.tie_word_embeddings = vocab_size, False
