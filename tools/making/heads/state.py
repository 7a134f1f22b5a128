"""The state of a training on the disk: a run that was killed goes on from it as if it had never stopped."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ....engines import RequestError
from ....engines.bundle.whole_files import write_whole
from ...training_settings import flag

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FILE = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """How far a training has come."""

    written: int = 0  # rows that the target has written
    writing: float | None = None  # seconds that this took, once it is over
    step: int = 0
    seconds: float = 0.0  # so far, of all runs together
    measured: list[dict[str, Any]] = field(default_factory=list)


def restore_progress(folder: Path, settings: "DataclassInstance") -> Progress | None:
    """Return how far the training in this folder has come, if it has begun; its settings must be these."""
    if not (folder / FILE).exists():
        return None
    try:
        with safe_open(folder / FILE, "pt") as opened:
            said = json.loads(opened.metadata()["training"])
        theirs, progress = said["settings"], Progress(**said["progress"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{folder / FILE} is not the state of a training; remove {folder}") from error
    for name, value in asdict(settings).items():
        if theirs.get(name) != value:
            found = f"other {flag(name)}" if name == "prompts" else f"{flag(name)} {theirs.get(name)}, and not {value}"
            raise RequestError(
                f"{folder} holds a training with {found}; say the same to go on, or remove that folder to begin anew"
            )
    return progress


def restore_weights(folder: Path, models: dict[str, nn.Module], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Put weights, buffers and the optimizer's moments back."""
    with safe_open(folder / FILE, "pt") as opened:
        for name, model in models.items():
            with torch.no_grad():
                for key, kept in _kept(model).items():
                    kept.copy_(opened.get_tensor(f"{name}.{key}"))
        for index, weight in enumerate(_learned(optimizer)):
            moments = {moment: opened.get_tensor(f"{moment}.{index}").to(weight.device) for moment in MOMENTS}
            place = weight.device if optimizer.defaults["fused"] else "cpu"
            optimizer.state[weight] = {"step": torch.tensor(float(step), device=place), **moments}


def save_state(
    folder: Path,
    settings: "DataclassInstance",
    progress: Progress,
    models: dict[str, nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write the state whole, or leave the one before."""
    tensors: dict[str, Tensor] = {}
    for name, model in (models or {}).items():
        tensors |= {f"{name}.{key}": kept.detach() for key, kept in _kept(model).items()}
    if optimizer is not None and progress.step:
        for index, weight in enumerate(_learned(optimizer)):
            tensors |= {f"{moment}.{index}": optimizer.state[weight][moment] for moment in MOMENTS}
    said = json.dumps({"settings": asdict(settings), "progress": asdict(progress)})
    whole = {name: one.to("cpu", copy=True).contiguous() for name, one in tensors.items()}
    write_whole(folder / FILE, save(whole, metadata={"training": said}))


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's own tensors: learned weights and buffers, not what it borrows from the target."""
    learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return learned | dict(model.named_buffers())


def _learned(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
