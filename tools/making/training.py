"""The shared parts of training a pair and distilling a draft: models, batches, losses and measures."""

import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...engines import RequestError
from ...export.checking.quality import overlap
from .growing import LlamaSize
from .learning import NEGLIGIBLE, Kept, learn

MEASURED = 16  # held-out windows on which a model is measured
KEEPING_UP = 0.25  # what a token counts that an earlier draft proposes, beside one that all of them miss
Loss = Callable[[Tensor], Tensor]  # of a batch of token windows [B, T + 1]


class Batches(Protocol):
    """The text a training draws from: the same batches whenever it begins anew."""

    def draw(self) -> Tensor: ...


def refuse_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a name that torch does not know, or no such device here
        raise RequestError(
            f"--device is {name!r}, which torch cannot use here; expected cpu, or cuda with a GPU"
        ) from error


class Windows:
    """Windows of T + 1 tokens from one long stream, drawn by a fixed seed."""

    def __init__(self, stream: Tensor, width: int, batch: int, seed: int) -> None:
        if len(stream) <= width:
            raise RequestError(f"the text has {len(stream)} tokens, expected more than {width}, the width of a window")
        self.stream, self.width, self.batch = stream, width, batch
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Tensor:
        begins = torch.randint(len(self.stream) - self.width, (self.batch,), generator=self._generator)
        return self.stream[begins[:, None] + torch.arange(self.width + 1)]

    def fixed(self, count: int = MEASURED) -> Tensor:
        """The first windows of the stream, side by side, to measure on."""
        count = min(count, len(self.stream) // (self.width + 1))
        return self.stream[: count * (self.width + 1)].view(count, self.width + 1)


def new_llama(size: LlamaSize, vocab_size: int, positions: int, **special_ids: int | None) -> Any:
    """Make a model of random weights, with heads of at most 64."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=min(64, size.hidden),
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        **special_ids,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def next_token_loss(model: Any) -> Loss:
    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1], use_cache=False).logits.float()
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def distillation_loss(draft: Any, target: Any, reverse: bool = False) -> Loss:
    """KL(target ‖ draft) covers all that the target may say; KL(draft ‖ target) avoids what the target would not."""

    def loss(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            p = target(tokens[:, :-1], use_cache=False).logits.float().log_softmax(-1)
        q = draft(tokens[:, :-1], use_cache=False).logits.float()[..., : p.shape[-1]].log_softmax(-1)
        first, second = (q, p) if reverse else (p, q)
        divergence: Tensor = (first.exp() * (first - second)).sum(-1).mean()
        return divergence

    return loss


@torch.no_grad()
def what_others_miss(p: Tensor, earlier: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what is left of p [B, T, V] where all proposals of `earlier` drafts fail, drawn from these q.

    Also return how likely that is [B, T]. This is the distribution that one more draft's proposal is tested against.
    """
    chance = torch.ones_like(p[..., 0])
    for q in earlier:
        left = (p - q[..., : p.shape[-1]]).clamp_(min=0)
        fails = left.sum(-1)
        chance = chance * fails
        p = torch.where(fails[..., None] > NEGLIGIBLE, left / fails[..., None].clamp(min=NEGLIGIBLE), p)
    return p, chance


def boosted_loss(draft: Any, target: Any, earlier: Sequence[Any]) -> Loss:
    """KL of what earlier drafts leave of the target's distribution, as often as they fail; at times, of all of it.

    A draft that knew only what the others miss would fall out of step with the text before it comes to that.
    """

    def loss(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            p, *others = (
                model(tokens[:, :-1], use_cache=False).logits.float().softmax(-1) for model in (target, *earlier)
            )
            left, chance = what_others_miss(p, others)
        q = draft(tokens[:, :-1], use_cache=False).logits.float()[..., : p.shape[-1]].log_softmax(-1)
        weighted = chance * divergence(left, q) + KEEPING_UP * (1 - chance) * divergence(p, q)
        mean: Tensor = weighted.mean()
        return mean

    return loss


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) [B, T]."""
    found: Tensor = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    return found


class Taught:
    """A model that learns from batches by a loss, in bfloat16 on a GPU; the decay is of matrices alone."""

    def __init__(self, model: Any, loss: Loss, batches: Batches, rate: float) -> None:
        self.model, self._loss, self._batches = model, loss, batches
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        matrices = [weight for weight in weights if weight.dim() > 1]
        others = [weight for weight in weights if weight.dim() <= 1]
        self.groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1, "peak": rate},
            {"params": others, "weight_decay": 0.0, "peak": rate},
        ]
        self._drawn = 0

    def loss(self, step: int, done: float) -> Tensor:
        for _ in range(step - self._drawn):  # what an earlier process has learned from
            self._batches.draw()
        self._drawn = step + 1
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return self._loss(self._batches.draw().to(device))

    def learned(self, step: int, done: float) -> None:
        pass


def train(
    name: str,
    model: Any,
    loss: Loss,
    batches: Batches,
    steps: int,
    rate: float,
    until: float = math.inf,
    kept: Kept | None = None,
) -> int:
    """Train until `steps` are done or the clock has come to `until`, and return the steps done."""
    model.train()
    done = learn(name, Taught(model, loss, batches, rate), steps, until - monotonic(), kept=kept)
    model.eval()
    return done


@torch.no_grad()
def held_out_loss(model: Any, windows: Tensor) -> float:
    device = next(model.parameters()).device
    return sum(float(next_token_loss(model)(row[None].to(device))) for row in windows) / len(windows)


@torch.no_grad()
def acceptance(target: Any, draft: Any, windows: Tensor) -> dict[float, float]:
    """Expected acceptance by temperature on these windows: greedy agreement at 0, mean Σ min(p, q) at 1."""
    device = next(target.parameters()).device
    found = {0.0: 0.0, 1.0: 0.0}
    for row in windows:
        p, q = (model(row[None, :-1].to(device), use_cache=False).logits[0].float() for model in (target, draft))
        for temperature in found:
            found[temperature] += overlap(p, q, temperature) / len(windows)
    return found


@torch.no_grad()
def acceptance_of_misses(target: Any, draft: Any, earlier: Sequence[Any], windows: Tensor) -> dict[float, float]:
    """Expected acceptance by temperature where the proposals of all earlier drafts have failed."""
    device = next(target.parameters()).device
    hits, misses = {0.0: 0.0, 1.0: 0.0}, {0.0: 0.0, 1.0: 0.0}
    for row in windows:
        p, q, *others = (
            model(row[None, :-1].to(device), use_cache=False)
            .logits.float()
            .softmax(-1)[..., : target.config.vocab_size]
            for model in (target, draft, *earlier)
        )
        left, chance = what_others_miss(p, others)
        missed = torch.stack([p.argmax(-1) != other.argmax(-1) for other in others]).all(0)
        misses[1.0] += float(chance.sum())
        hits[1.0] += float((chance * torch.minimum(left, q).sum(-1)).sum())
        misses[0.0] += float(missed.sum())
        hits[0.0] += float((missed & (p.argmax(-1) == q.argmax(-1))).sum())
    return {temperature: hits[temperature] / max(misses[temperature], NEGLIGIBLE) for temperature in hits}
