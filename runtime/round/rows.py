"""The state of the live requests, one tensor row each, and the plan that says which work a round has to do."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH
from ..sampling.noise import uniforms
from ..sampling.params import SamplingParams

BLOCK = 64  # lengths whose uniforms are made at once: hashing a few numbers costs as much as hashing many

LEAST_LENIENCE = 1e-30  # its logarithm is finite, so that what a request excludes stays excluded


@cache
def counting(n: int, device: torch.device) -> Tensor:
    """0 … n - 1, made once: nobody writes to it."""
    return torch.arange(n, device=device)


def pick(tensor: Tensor, index: Tensor) -> Tensor:
    """Row a of the result is tensor[a, index[a]]."""
    return tensor[counting(len(tensor), tensor.device), index]


@dataclass(frozen=True)
class Plan:
    """What one round computes, known on the host before it starts; equal plans run the same operations."""

    batch: int
    draft_length: int  # K: the widest of the live rows
    model: bool = False  # some row drafts with the draft model
    lookup: bool = False  # some row drafts by copying from its context
    suffix: bool = False  # some row takes what the host suggests
    ngram: bool = False  # some row drafts from counted n-grams
    random: bool = False  # some row drafts from all tokens alike
    cascade: bool = False  # some row drafts with the draft model in one pass over a copy from its context
    ragged: bool = False  # some row proposes less than K tokens
    tempered: bool = False  # some row divides its scores by a temperature
    own_draft: bool = False  # the draft of some row samples at a temperature of its own
    rejection: bool = False  # some row samples by the rejection rule
    coupled: bool = False  # some row is greedy or samples by the coupled rule
    gumbel: bool = False  # some row samples by the coupled rule
    lenient: bool = False  # some row accepts more than is lossless
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalised: bool = False
    biased: bool = False
    logprobs: int | None = None
    traced: bool = False
    entropies: bool = False  # some row chooses its draft length by the draft's entropy

    @property
    def sampled(self) -> bool:
        """Whether some row's proposals are sampled one after another."""
        return self.model or self.ngram or self.random

    @property
    def runs_draft(self) -> bool:
        return self.model or self.cascade

    @property
    def probabilities(self) -> bool:
        """Whether p and q themselves are needed, not only who wins."""
        return self.rejection or self.traced


@dataclass
class Rows:
    """Row r of every tensor belongs to one request; live rows are dense."""

    tokens: Tensor  # [M, L] int64, committed up to `length`
    length: Tensor  # [M] int64
    from_model: Tensor  # [M] int64, how many proposals of the draft model the row takes
    from_lookup: Tensor  # [M] int64, likewise
    from_suffix: Tensor  # [M] int64, likewise
    from_ngram: Tensor  # [M] int64, likewise
    from_random: Tensor  # [M] int64, likewise
    from_cascade: Tensor  # [M] int64, how many a row takes at most
    suggested: Tensor  # [M, 16] int64, proposals of the host
    entropy_limit: Tensor  # [M] float32, the row proposes no further where the draft's entropy exceeds it
    coupled: Tensor  # [M] bool: greedy or the coupled rule
    seed: Tensor  # [M, 2] int64, 32-bit words
    temperature: Tensor  # [M] float32, 1 for greedy rows
    draft_temperature: Tensor  # [M] float32, likewise
    draft_depth: Tensor  # [M] float32, how far below its best score a draft samples: inf, or 0 if it alone is greedy
    noise_scale: Tensor  # [M] float32, 0 for greedy rows
    lenience: Tensor  # [M] float32, 1 is lossless
    top_k: Tensor  # [M] int64, the vocabulary's size when off
    unlikely: Tensor  # [M, 17, 1] float32, 1 - top_p: the mass that may be left out at each position, -1 when off
    log_min_p: Tensor  # [M] float32, -inf when off
    repetition: Tensor  # [M] float32
    presence: Tensor  # [M] float32
    frequency: Tensor  # [M] float32
    uniforms: Tensor  # [M, 2 · BLOCK, 17, 2] float64: of rounds that begin at each length of an even and an odd block
    bias: Tensor  # [M, V] float32, on the CPU [M, 0] until a request has one
    prompt_counts: Tensor  # [M, V] float32, on the CPU [M, 0] until a request is penalised
    output_counts: Tensor  # [M, V] float32, likewise

    @classmethod
    def allocate(cls, rows: int, length: int, vocab_size: int, device: str) -> "Rows":
        wide = 0 if device == "cpu" else vocab_size  # on a GPU nothing may move that a recorded round reads

        def whole(*size: int) -> Tensor:
            return torch.zeros(rows, *size, dtype=torch.int64, device=device)

        def real(*size: int) -> Tensor:
            return torch.zeros(rows, *size, device=device)

        return cls(
            tokens=whole(length),
            length=whole(),
            from_model=whole(),
            from_lookup=whole(),
            from_suffix=whole(),
            from_ngram=whole(),
            from_random=whole(),
            from_cascade=whole(),
            suggested=whole(MAX_DRAFT_LENGTH),
            entropy_limit=real(),
            coupled=torch.zeros(rows, dtype=torch.bool, device=device),
            seed=whole(2),
            temperature=real(),
            draft_temperature=real(),
            draft_depth=real(),
            noise_scale=real(),
            lenience=real(),
            top_k=whole(),
            unlikely=real(MAX_DRAFT_LENGTH + 1, 1),
            log_min_p=real(),
            repetition=real(),
            presence=real(),
            frequency=real(),
            uniforms=torch.zeros(rows, 2 * BLOCK, MAX_DRAFT_LENGTH + 1, 2, dtype=torch.float64, device=device),
            bias=real(wide),
            prompt_counts=real(wide),
            output_counts=real(wide),
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def view(self, batch: int) -> "Rows":
        """The first `batch` rows, sharing memory."""
        return Rows(**{name: tensor[:batch] for name, tensor in self._tensors()})

    def move(self, source: int, destination: int) -> None:
        for _, tensor in self._tensors():
            tensor[destination] = tensor[source]

    def admit(self, row: int, prompt: list[int], params: SamplingParams, seed: int, vocab_size: int) -> None:
        """Begin a request in `row`."""
        self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.length[row] = len(prompt)
        self.coupled[row] = params.greedy or params.rule == "coupled"
        self.seed[row] = torch.tensor([seed & 0xFFFFFFFF, seed >> 32])
        self.temperature[row] = params.temperature or 1.0
        self.draft_temperature[row] = params.own_draft_temperature or 1.0
        self.draft_depth[row] = 0.0 if params.own_draft_temperature == 0 and not params.greedy else torch.inf
        self.noise_scale[row] = 0.0 if params.greedy else 1.0
        self.lenience[row] = max(params.lenience, LEAST_LENIENCE)
        self.top_k[row] = min(params.top_k or vocab_size, vocab_size)
        self.unlikely[row] = 1 - params.top_p if params.top_p < 1 else -1.0
        self.log_min_p[row] = torch.tensor(params.min_p).log()
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        if params.logit_bias:
            self.bias = _widened(self.bias, vocab_size)
        if params.penalised:
            self.prompt_counts = _widened(self.prompt_counts, vocab_size)
            self.output_counts = _widened(self.output_counts, vocab_size)
        self.bias[row] = 0
        for token, bias in params.logit_bias.items():
            self.bias[row, token] = bias
        self.output_counts[row] = 0
        if self.prompt_counts.shape[1]:
            self.prompt_counts[row] = torch.bincount(torch.tensor(prompt), minlength=vocab_size).float()

    def fill_uniforms(self, row: int, block: int) -> None:
        """Make the uniforms of all rounds that begin at the lengths of this block."""
        length = torch.arange(block * BLOCK, (block + 1) * BLOCK, device=self.length.device)
        place = block % 2 * BLOCK
        self.uniforms[row, place : place + BLOCK] = uniforms(self.seed[row], length, MAX_DRAFT_LENGTH + 1)

    def round_uniforms(self) -> tuple[Tensor, Tensor]:
        """The uniforms [A, 17] of this round: one to draw each token, one to test it."""
        draw, test = pick(self.uniforms, self.length % (2 * BLOCK)).unbind(-1)
        return draw, test


def _widened(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[1] else tensor.new_zeros(len(tensor), size)
