"""Add to the scores of a block's places what the tokens before them bring, and say how sure the head is (DSpark)."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...engines import CALL, Bundle, BundleError
from ...engines.bundle import TABLES, read_tables


@dataclass(frozen=True)
class Markov:
    before: Tensor  # [V, R], of each token that comes before
    after: Tensor  # [R, N], of each that may follow
    tokens: Tensor  # [N] int64, which those are
    confidence: Tensor  # [C], weights of a hidden state and a row of `before`, or of a hidden state; none: C is 0
    confidence_bias: Tensor  # [1]

    @classmethod
    def read(cls, bundle: Bundle, head: str, device: str) -> "Markov":
        """Read that of a head, for the tokens that the bundle's tokenizer has."""
        tables = read_tables(bundle, head, [one.name for one in fields(cls)])
        found = cls(**{name: torch.from_numpy(table).to(device) for name, table in tables.items()})
        vocab, rank = bundle.tokenizer.vocab_size, found.after.shape[0]
        [hidden] = bundle.models[head].contract.of_kind(CALL)[0].shape
        sound = (
            found.before.shape[1:] == (rank,)
            and len(found.before) >= vocab
            and found.tokens.shape == found.after.shape[1:]
            and found.tokens.dtype == torch.int64
            and bool((found.tokens >= 0).all())
            and found.confidence.shape in ((0,), (hidden,), (hidden + rank,))
            and found.confidence_bias.shape == (1,)
        )
        if not sound:
            raise BundleError(
                f"{bundle.path / head / TABLES} holds tables that do not fit together; export the bundle again"
            )
        known = found.tokens < vocab
        return cls(found.before, found.after[:, known], found.tokens[known], found.confidence, found.confidence_bias)

    def following(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits [A, P, V] of places after these tokens [A, P]."""
        return logits.index_add(2, self.tokens, self.before[tokens] @ self.after)

    def sure(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return how likely what follows these tokens [A, 1] is accepted, by the hidden states [A, 1, H] of places."""
        read = torch.cat([states.float(), self.before[tokens]], -1)[..., : len(self.confidence)]
        return (read @ self.confidence + self.confidence_bias).sigmoid()
