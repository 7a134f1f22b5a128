"""Which drafts read images as their target does, and how much of their entries."""

from dataclasses import dataclass
from typing import Any

from ...engines import Contract
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.whole import whole_config
from ..seeing.families import seeing_contract


@dataclass(frozen=True)
class SeeingTarget:
    """What a target reads of images, so that its drafts read the same."""

    checkpoint: Checkpoint
    contract: Contract
    size: int  # of its embeddings

    def draft(self, draft: Checkpoint, contract: Contract, size: int) -> Contract:
        """Return the contract of a draft; its architecture and the size of its embeddings must be the target's to see.

        One of the target's own type reads whole entries, at the target's positions; others the embeddings in them.
        """
        unlike = draft.architecture != self.checkpoint.architecture or size != self.size
        if unlike or contract.recurrent:
            return contract
        if draft.reads_more == self.checkpoint.reads_more:
            own = seeing_contract(whole_config(draft), contract)
            if own.image_size == self.contract.image_size:
                return own
        return contract.with_images(size)


def embedding_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[1])
