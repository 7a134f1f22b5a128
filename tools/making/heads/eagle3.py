"""EAGLE-3: the head reads three hidden states of the target, and is written as speculators 0.9 writes it.

It begins as the best linear map from what it reads to the target's last hidden state one token later, and with the
target's vocabulary projection.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....export.kinds.eagle3 import Eagle3, Parts, Wiring
from ...training_settings import DRAFT_VOCAB, HeadSettings
from ..learning import NEGLIGIBLE
from .slots import FAINT, MEASURED, RIDGE, SlotLesson, rms
from .spoken import Rows, Spoken

OF_THE_TARGET = 0.25  # rate of what begins as the target's
SHARPNESS = 8.0  # of its first attention: the score of a slot with itself
ENCODER, EMBEDDING = "encoder.", "embed_tokens.weight"


class Eagle3Lesson(SlotLesson[Eagle3]):
    @property
    def layers(self) -> tuple[int, ...]:
        count = self.teacher.checkpoint.shape.layers
        return tuple(sorted({min(max(0, layer), count - 1) for layer in (2, count // 2, count - 3)}))

    def begin(self, spoken: Spoken, settings: HeadSettings) -> Eagle3:
        from transformers import LlamaConfig

        vocab_size, width = self.teacher.projection.shape
        config = LlamaConfig(**self.layer(settings))
        draft_vocab = min(settings.draft_vocab or DRAFT_VOCAB, vocab_size)
        parts = Parts(width, len(self.layers), draft_vocab)
        head: Eagle3 = Eagle3(config, parts, Wiring(self.layers)).to(self.teacher.device, torch.float32)
        head.embed_tokens.weight = nn.Parameter(self.teacher.embedding, requires_grad=False)
        ids = _frequent(spoken.tokens(spoken.learned), vocab_size, draft_vocab)
        know(head, ids)
        self._prime(head, spoken.rows(spoken.learned[:MEASURED]))
        return head

    @torch.no_grad()
    def _prime(self, head: Eagle3, rows: Rows) -> None:
        """Begin with what the best linear map foretells of the target's next last hidden state.

        Of what the slot reads, the features take their part as it is, and the attention takes the embedding's: each
        slot attends to itself, and values and output are that part's main axes.
        """
        layer: Any = head.layers[0]
        width, inputs = head.config.hidden_size, len(self.layers)
        embedded = layer.input_layernorm(head.embed_tokens(rows.tokens[:, 1:])).flatten(0, 1)
        hidden = rows.hidden[:, :-1].flatten(0, 1).flatten(1)  # [N, n * H]
        scale = rms(hidden)
        known_of = torch.cat([hidden / scale, embedded], 1)
        last = rows.last[:, 1:].flatten(0, 1)
        weight = rms(last)
        square = known_of.T @ known_of
        square.diagonal().add_(RIDGE * len(known_of))
        best = torch.linalg.solve(square, known_of.T @ (last / weight)).T  # [H, n * H + H]
        self._fc_rate = min(1.0, 1 / float(scale.median()))  # a step of AdamW moves all weights as far
        head.encoder.fc.weight.copy_(best[:, : inputs * width] / scale)
        foretold = known_of @ best.T
        head.norm.weight.copy_(weight * float(rms(foretold.flatten())))  # the norm undoes that it is shorter
        head.lm_head.weight.copy_(self.teacher.projection[known(head)])
        self._attend_to_itself(head, best[:, inputs * width :], embedded)

    def _attend_to_itself(self, head: Eagle3, wanted: Tensor, embedded: Tensor) -> None:
        """Let each slot look at itself, and bring as much of wanted [H, H] times its embedding as the values hold."""
        layer: Any = head.layers[0]
        width, attention = head.config.hidden_size, layer.self_attn
        size, groups, heads = attention.head_dim, head.config.num_key_value_heads, head.config.num_attention_heads
        axes = torch.linalg.eigh(embedded.T @ embedded)[1].flip(1).T[: size * groups]  # by which embeddings differ
        left, strength, right = torch.linalg.svd(wanted)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.weight.mul_(FAINT)
        layer.mlp.down_proj.weight.mul_(FAINT)
        for group in range(groups):
            mine = axes[group::groups]
            score = (embedded @ mine.T).square().sum(-1).mean() / size**0.5
            sharp = (SHARPNESS / (score + NEGLIGIBLE)).sqrt()
            place = slice(group * size, group * size + len(mine))
            attention.k_proj.weight[place, :width] += sharp * mine
            main = torch.arange(group, len(strength), groups, device=wanted.device)[:size]
            value = slice(group * size, group * size + len(main))
            attention.v_proj.weight[value, :width] += right[main]
            for one in range(group * heads // groups, (group + 1) * heads // groups):
                place, value = (slice(one * size, one * size + len(of)) for of in (mine, main))
                attention.q_proj.weight[place, :width] += sharp * mine
                attention.o_proj.weight[:, value] += (left[:, main] * strength[main]) * groups / heads

    def rates(self, head: Eagle3) -> list[tuple[Tensor, float]]:
        return [(head.lm_head.weight, OF_THE_TARGET), (head.encoder.fc.weight, self._fc_rate)]

    def features(self, head: Eagle3, rows: Rows) -> Tensor:
        found: Tensor = head.encoder(rows.hidden[:, :-1].unbind(2))
        return found

    def known(self, head: Eagle3) -> Tensor:
        return known(head)

    def tensors(self, head: Eagle3) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {
            name.removeprefix(ENCODER): weight for name, weight in head.named_parameters() if name != EMBEDDING
        }
        if head.parts.draft_vocab < self.teacher.vocab_size:
            ids = known(head).cpu()
            found["d2t"] = ids - torch.arange(len(ids))
            found["t2d"] = torch.zeros(self.teacher.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        return found

    def fields(self, head: Eagle3) -> dict[str, Any]:
        layer = head.config.to_diff_dict()
        return {
            "architectures": ["Eagle3Speculator"],
            **self.speculators("eagle3"),
            "transformer_layer_config": {"model_type": "llama", **layer},
            "draft_vocab_size": head.parts.draft_vocab,
            "target_hidden_size": head.parts.target_hidden,
            "eagle_aux_hidden_state_layer_ids": list(head.wiring.layers),
            "norm_before_residual": head.wiring.norm_before_residual,
            "norm_before_fc": head.parts.norm_before_fc,
            "fc_norm": head.parts.fc_norm,
            "norm_output": head.wiring.norm_output,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "dtype": "float16",
        }


def known(head: Eagle3) -> Tensor:
    """Return the tokens that the head may propose, in its own order."""
    places: Tensor = head.places
    return (places < head.parts.draft_vocab).nonzero()[:, 0]


def know(head: Eagle3, ids: Tensor) -> None:
    """Let the head propose these tokens, in ascending order."""
    head.places.fill_(head.parts.draft_vocab)
    head.places[ids.to(head.places.device)] = torch.arange(len(ids), device=head.places.device)


def _frequent(tokens: Tensor, vocab_size: int, count: int) -> Tensor:
    """Return the most frequent tokens in ascending order; of equally frequent ones the lower."""
    often = torch.bincount(tokens.flatten(), minlength=vocab_size)
    return often.sort(descending=True, stable=True)[1][:count].sort()[0]
