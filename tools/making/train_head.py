"""Teach a head what its target itself says: a part that reads the target's hidden states and proposes tokens.

The target continues the prompts at temperature 1 in rows of so many tokens, prompts among them; every tenth row is held
out. What a head reads of the target is kept beside the head while it learns, in .NAME.training with the state of the
training: a run that was killed goes on from there if it is started again with the same settings. The folder is removed
at the end.

What is returned says how often proposals at place 1 to 4 of a round are accepted on what was held out, before, at each
quarter and after, as Σ min(p, q) at temperature 1 and as greedy agreement, beside the same of a counted bigram.
"""

import math
import shutil
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from ...engines import RequestError
from ...export.checkpoints.checkpoint import open_checkpoint
from ...export.checkpoints.vocabulary import read_vocabulary
from ...export.writing.aside import built_aside, refuse_foreign
from ...export.writing.quiet import quiet_libraries
from ..console import progress
from ..training_settings import HeadSettings, refuse_pace, settings_of
from .heads import LESSONS
from .heads.lesson import Lesson
from .heads.measures import bigram, by_place, measured_rows
from .heads.spoken import HELD_OUT, TOGETHER, Spoken
from .heads.state import Progress, restore_progress, restore_weights, save_state
from .heads.teacher import Teacher
from .learning import learn, time_left
from .prompts import token_ids
from .training import refuse_device

WRITING = 1 / 5  # share of --minutes in which the target may write
AVERAGED = 0.998  # of the running mean of the weights, which is what is written
QUARTERS = 4


def train_head(
    kind: str,
    target: str,
    out: Path,
    prompts: Sequence[str],
    steps: int = HeadSettings.usual_steps,
    minutes: float = math.inf,
    **options: Any,  # fields of HeadSettings
) -> dict[str, Any]:
    """Write the trained head to `out` and return what it brings."""
    settings = settings_of(kind, target, prompts, **options)
    assert isinstance(settings, HeadSettings)
    refuse_pace(steps, minutes)
    refuse_device(settings.device)
    refuse_foreign(out)
    with quiet_libraries():
        checkpoint = open_checkpoint(target)
        ids = token_ids(read_vocabulary(checkpoint).tokenizer, prompts)
        _refuse_lengths(ids, settings.length, checkpoint.shape.positions)
        folder = out.with_name(f".{out.name}.training")
        begun = restore_progress(folder, settings) or Progress()
        lesson = LESSONS[kind](Teacher(checkpoint, settings.device))
        spoken = Spoken(folder, settings, lesson.layers, lesson.teacher)
        run = Run(folder, settings, begun, lesson, spoken, 60 * minutes)
        run.let_write(ids)
        head, brought = run.learn(steps)
        with built_aside(out) as aside:
            lesson.write(head, aside)
            size = sum(file.stat().st_size for file in aside.iterdir())
        shutil.rmtree(folder)
    return {
        "parameters": sum(weight.numel() for weight in head.parameters() if weight.requires_grad),
        "bytes": size,
        "rows": spoken.count,
        "steps": begun.step,
        "minutes": round(run.seconds / 60, 1),
        "held_out_tokens": len(measured_rows(spoken)) * settings.length,
        **brought,
    }


class Run:
    """One training from its first row to its last step, whatever number of processes it takes."""

    def __init__(
        self, folder: Path, settings: HeadSettings, begun: Progress, lesson: Lesson[Any], spoken: Spoken, limit: float
    ) -> None:
        self.folder, self.settings, self.progress = folder, settings, begun
        self.lesson, self.spoken, self.limit = lesson, spoken, limit
        self._began, self._before = monotonic(), begun.seconds

    @property
    def seconds(self) -> float:
        """So far, of all processes together."""
        return self._before + monotonic() - self._began

    def let_write(self, prompts: Sequence[Sequence[int]]) -> None:
        """Let the target write, in a share of the time at most."""
        now, spoken, total = self.progress, self.spoken, self.settings.samples
        spoken.count = now.written
        if now.writing is not None:
            return
        allowed = WRITING * self.limit
        with progress("target", total=-(-total // TOGETHER), ticking=True) as show:

            def goes_on() -> bool:
                now.written = spoken.count
                self.save()
                done = max(now.written / total, self.seconds / allowed)
                left = f", {time_left(self.seconds, done)} left of writing" if now.written else ""
                show(f"writes rows {now.written + 1} to {min(total, now.written + TOGETHER)} of {total}{left}")
                return now.written < HELD_OUT or self.seconds < allowed

            spoken.write(self.lesson.teacher, prompts, goes_on)
        now.written, now.writing = spoken.count, self.seconds
        self.save()

    def learn(self, steps: int) -> tuple[nn.Module, dict[str, Any]]:
        """Train, and return the running mean of the head with its measures."""
        torch.manual_seed(self.settings.seed)
        head = self.lesson.begin(self.spoken, self.settings)
        course = HeadCourse(self, head)
        if not self.progress.measured:
            course.measure(head, "before")
        writing = self.progress.writing or 0.0
        learn(self.settings.kind, course, steps, self.limit - writing, self.seconds - writing, kept=course)
        course.measure(course.mean, "after")
        before, *between, after = self.progress.measured
        brought = {"before": before, "quarters": between, "after": after, "bigram": bigram(self.lesson, self.spoken)}
        return course.mean, brought

    def save(self, *parts: Any) -> None:
        self.progress.seconds = self.seconds
        save_state(self.folder, self.settings, self.progress, *parts)


class HeadCourse:
    """What a head learns of the rows that its target wrote; the running mean of its weights is what is written."""

    def __init__(self, run: Run, head: nn.Module) -> None:
        self.model, self._run = head, run
        self.mean = deepcopy(head, {id(one): one for one in head.parameters() if not one.requires_grad})
        shares = {id(weight): share for weight, share in run.lesson.rates(head)}
        self.groups: list[dict[str, Any]] = [
            {"params": [weight], "weight_decay": 0.0, "peak": run.settings.rate * shares.get(id(weight), 1.0)}
            for weight in head.parameters()
            if weight.requires_grad
        ]
        self._rows = run.spoken.learned

    def loss(self, step: int, done: float) -> Tensor:
        settings = self._run.settings
        draw = torch.Generator().manual_seed(2 * settings.seed * 2**32 + step)
        chosen = self._rows[torch.randint(len(self._rows), (settings.batch,), generator=draw)]
        return self._run.lesson.loss(self.model, self._run.spoken.rows(chosen), done, draw)

    @torch.no_grad()
    def learned(self, step: int, done: float) -> None:
        kept = min(AVERAGED, step / (step + 9))  # the first weights shall not linger
        for ours, theirs in zip(self.mean.parameters(), self.model.parameters(), strict=True):
            if theirs.requires_grad:
                ours.lerp_(theirs, 1 - kept)
        now = self._run.progress
        now.step = step
        if len(now.measured) < QUARTERS and done * QUARTERS >= len(now.measured):
            self.measure(self.mean, f"{len(now.measured)}/{QUARTERS}")

    def measure(self, head: nn.Module, when: str) -> None:
        now = self._run.progress
        now.measured.append({"at": when, "step": now.step, **by_place(self._run.lesson, head, self._run.spoken)})

    def restore(self, optimizer: torch.optim.Optimizer) -> int:
        step = self._run.progress.step
        if step:
            restore_weights(self._run.folder, self._parts, optimizer, step)
        return step

    def save(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        self._run.progress.step = step
        self._run.save(self._parts, optimizer)

    @property
    def _parts(self) -> dict[str, nn.Module]:
        return {"head": self.model, "mean": self.mean}


def _refuse_lengths(ids: Sequence[Sequence[int]], length: int, positions: int) -> None:
    longest = max(map(len, ids), default=0)
    if not 0 < longest < length:
        raise RequestError(f"the longest prompt has {longest} tokens, expected 1 to {length - 1}: --length is {length}")
    if length > positions:
        raise RequestError(f"--length is {length}, expected at most {positions}, the positions of the target")
