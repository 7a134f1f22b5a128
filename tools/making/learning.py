"""The one loop of all training: AdamW with a warm-up and a cosine, the state on the disk, and how long is left."""

import math
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..console import progress

WARM_UP = 0.05  # share of the training in which the rate rises to its peak
SAID = 20  # times the loss is shown
SAVED = 30.0  # seconds after which the state is saved again
NEGLIGIBLE = 1e-9  # what keeps a quotient finite


class Course(Protocol):
    """What is learned: a kind of training has its own weights, data and loss."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The weights as AdamW takes them; `peak` is the highest rate of a group."""

    def loss(self, step: int, done: float) -> Tensor:
        """Return the loss of this step's batch; `done` is the share of the training that is done."""

    def learned(self, step: int, done: float) -> None:
        """What is done after so many steps."""


class Kept(Protocol):
    """The state of a training on the disk, so that one that was killed goes on."""

    def restore(self, optimizer: torch.optim.Optimizer) -> int:
        """Put back what was saved, and return after which step that was."""

    def save(self, optimizer: torch.optim.Optimizer, step: int) -> None: ...


def learn(
    name: str, course: Course, steps: int, seconds: float = math.inf, spent: float = 0.0, kept: Kept | None = None
) -> int:
    """Learn until `steps` are done or `seconds` are over, whichever is nearer; return the steps done.

    An earlier process may have `spent` some of the seconds. Where the state is kept, it is saved now and then, and at
    the end, also where Ctrl-C or SIGTERM is the end.
    """
    device = next(course.model.parameters()).device
    optimizer = torch.optim.AdamW(course.groups, betas=(0.9, 0.95), fused=device.type == "cuda")
    before = step = kept.restore(optimizer) if kept else 0
    began = saved = monotonic()

    def share() -> float:
        """How much of the training is done."""
        return min(1.0, max(step / steps, (spent + monotonic() - began) / max(seconds, NEGLIGIBLE)))

    said, begun = 0, share()
    try:
        with progress(name, total=1 + SAID, ticking=True) as show:
            while step == 0 or share() < 1:
                value = _step(course, optimizer, share(), step, steps)
                step += 1
                done = share()
                course.learned(step, done)
                if step == before + 1 or done * SAID >= said:
                    of = f" of {steps}" if math.isinf(seconds) else ""
                    left = time_left(monotonic() - began, (done - begun) / max(1 - begun, NEGLIGIBLE))
                    show(f"step {step}{of}: loss {value:.3f}, {left} left")
                    said = int(done * SAID) + 1
                if kept and monotonic() >= saved + SAVED:
                    kept.save(optimizer, step)
                    saved = monotonic()
    finally:
        if kept and step > before:
            kept.save(optimizer, step)
    return step


def _step(course: Course, optimizer: torch.optim.Optimizer, done: float, step: int, steps: int) -> float:
    loss = course.loss(step, done)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.nn.utils.clip_grad_norm_([weight for weight in course.model.parameters() if weight.requires_grad], 1.0)
    rising = max((step + 1) / max(1, round(WARM_UP * steps)), done / WARM_UP)
    at = min(rising, 0.5 * (1 + math.cos(math.pi * done)))
    for group in optimizer.param_groups:
        group["lr"] = at * group["peak"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def time_left(seconds: float, done: float) -> str:
    """Say how long the rest takes if this share has taken so long."""
    left = seconds * (1 - min(1.0, done)) / max(done, NEGLIGIBLE)
    return f"about {left / 60:.0f} min" if left >= 90 else f"about {left:.0f} s"
