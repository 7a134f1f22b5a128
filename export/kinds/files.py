"""The files of a head: its configuration, the shapes of its tensors, and the tensors themselves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...engines import ExportError
from ...engines.errors import first_line
from ..checkpoints.weight_files import require_weights, weight_files

Found = TypeVar("Found")


@dataclass(frozen=True)
class HeadFiles:
    """The files of a head, its weights still unread."""

    name: str  # as the user gave it
    path: Path
    fields: Mapping[str, Any]  # of its config.json

    @property
    def label(self) -> str:
        place = Path(self.name).resolve()
        return place.name if place.exists() else self.name.partition("@")[0]

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors."""
        files = weight_files(self.name, self.path)
        return _of_each(f"head {self.name}", files, lambda file, key: file.get_tensor(key))


def shapes_of(name: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors, and nothing else of them; none where there are no safetensors."""
    if not Path(name).is_dir():  # of the Hub, from which small files alone have come
        require_weights(name, path)
    files = weight_files(name, path)
    return _of_each(f"checkpoint {name}", files, lambda file, key: tuple(file.get_slice(key).get_shape()))


def _of_each(whose: str, files: list[Path], read: Callable[[Any, str], Found]) -> dict[str, Found]:
    """Read something of each tensor, or say in a sentence that a file cannot be read."""
    found: dict[str, Found] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                found |= {key: read(opened, key) for key in opened.keys()}  # noqa: SIM118  # it is no mapping
        except (OSError, SafetensorError) as error:
            raise ExportError(f"the weights of {whose} cannot be read: {first_line(error)}") from error
    return found


def refuse_unknown(name: str, fields: Any, known: set[str]) -> None:
    """Refuse a head if an object of its config.json has another field than those that are known of it."""
    if not isinstance(fields, Mapping):
        raise ExportError(f"config.json of head {name} is damaged; download it again")
    if unknown := sorted(set(fields) - known):
        raise ExportError(
            f"head {name} has the field {unknown[0]!r} in its config.json, which this version does not know and "
            "which may change what it computes"
        )


def filled(head: Any, tensors: Mapping[str, Tensor], name: str, dtype: str) -> None:
    """Give a head its tensors, or say which of them is missing, too many, of another shape or no numbers."""
    expected = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    for key, shape in expected.items():
        if key not in tensors:
            raise ExportError(f"head {name} lacks the tensor {key}; download it again")
        if tuple(tensors[key].shape) != shape:
            raise ExportError(
                f"tensor {key} of head {name} is {list(tensors[key].shape)}, expected {list(shape)}; take the head of "
                "this target"
            )
    if extra := sorted(set(tensors) - set(expected)):
        raise ExportError(f"head {name} has the tensor {extra[0]}, which a head of its config.json does not have")
    for key, value in tensors.items():
        if not torch.stack(torch.aminmax(value)).isfinite().all():
            raise ExportError(f"tensor {key} of head {name} holds numbers that are not finite; take a sound one")
    kind = getattr(torch, dtype)
    head.load_state_dict({key: value.to(kind) for key, value in tensors.items()}, assign=True)
    tied: dict[int, nn.Parameter] = {}  # what a target has once, torch would trace twice
    for module in head.modules():
        for own, weight in module.named_parameters(recurse=False):
            setattr(module, own, tied.setdefault(weight.data_ptr(), weight.requires_grad_(False)))
    head.eval()
