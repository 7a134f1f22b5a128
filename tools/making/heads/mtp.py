"""MTP: one layer that reads an embedding beside the target's last hidden state, written as speculators 0.9 writes it.

It begins as the best linear map from what it reads to the target's last hidden state one token later. Embedding and
vocabulary projection are the target's, and stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....export.kinds.layers import LAYERS
from ....export.kinds.mtp import NAMES, Mtp
from ...training_settings import HeadSettings
from .slots import FAINT, MEASURED, RIDGE, SlotLesson, rms
from .spoken import Rows, Spoken

KIND = "qwen3"  # of the layer: the one that speculators trains


class MtpLesson(SlotLesson[Mtp]):
    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    def begin(self, spoken: Spoken, settings: HeadSettings) -> Mtp:
        from transformers import Qwen3Config

        config = Qwen3Config(**self.layer(settings), attn_implementation="eager")
        head: Mtp = Mtp(config, LAYERS[KIND]).to(self.teacher.device, torch.float32)
        head.embed_tokens.weight = nn.Parameter(self.teacher.embedding, requires_grad=False)
        head.lm_head.weight = nn.Parameter(self.teacher.projection, requires_grad=False)
        self._prime(head, spoken.rows(spoken.learned[:MEASURED]))
        return head

    @torch.no_grad()
    def _prime(self, head: Mtp, rows: Rows) -> None:
        layer: Any = head.layer
        read = torch.cat([layer.enorm(head.embed_tokens(rows.tokens[:, 1:])), layer.hnorm(rows.last[:, :-1])], -1)
        read, last = read.flatten(0, 1), rows.last[:, 1:].flatten(0, 1)
        weight = rms(last)
        square = read.T @ read
        square.diagonal().add_(RIDGE * len(read))
        best = torch.linalg.solve(square, read.T @ (last / weight)).T  # [H, 2 * H]
        layer.eh_proj.weight.copy_(best)
        layer.post_norm.weight.copy_(weight * float(rms((read @ best.T).flatten())))  # it undoes that this is shorter
        layer.mtp_block.self_attn.o_proj.weight.mul_(FAINT)
        layer.mtp_block.mlp.down_proj.weight.mul_(FAINT)

    def rates(self, head: Mtp) -> list[tuple[Tensor, float]]:
        return []

    def features(self, head: Mtp, rows: Rows) -> Tensor:
        return rows.last[:, :-1]

    def tensors(self, head: Mtp) -> dict[str, Tensor]:
        found = {}
        for name, weight in head.layer.named_parameters():
            part, _, rest = name.partition(".")
            found[f"mtp_layers.0.{f'{NAMES[part][0]}.{rest}' if part in NAMES else rest}"] = weight
        return found

    def fields(self, head: Mtp) -> dict[str, Any]:
        return {
            "architectures": ["MTPDraftModel"],
            **self.speculators("mtp"),
            "transformer_layer_config": {"model_type": KIND, **head.config.to_diff_dict()},
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "dtype": "float16",
        }
