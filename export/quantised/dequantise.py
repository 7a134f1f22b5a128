"""Give transformers the weights of a quantised checkpoint as those of an ordinary one, dequantised one by one."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ...engines import ExportError
from .method import Centred, Method
from .table import METHODS

NUMBERS = ("BF16", "F16", "F32", "F64")  # types that mean what they say
SETTINGS = ("quantization_config", "compression_config")
TURNED = ("gpt2", "openai-gpt")  # families whose matrices lie the other way: a square one would fit both ways


def how_quantised(name: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings by which a checkpoint was quantised, or refuse them by name; None if it was not."""
    places = [fields, fields.get("text_config")]  # the second, where a text model is only a part
    found = [place.get(key) for place in places if isinstance(place, dict) for key in SETTINGS]
    settings = next(filter(None, found), None)
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method is None and isinstance(settings, dict) and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "modelopt" and not settings.get("quant_algo"):
        return None  # only its cache was to be quantised
    if method not in METHODS:
        raise ExportError(
            f"checkpoint {name} is quantised by {method or 'some method'}, expected {', '.join(METHODS)}; export the "
            "unquantised checkpoint"
        )
    if fields.get("model_type") in TURNED:
        raise ExportError(
            f"checkpoint {name} is quantised by {method}, and a {fields['model_type']} keeps its matrices transposed, "
            "so that a quantised one may lie either way; export the unquantised checkpoint"
        )
    try:
        words = METHODS[method].words(settings)
    except ExportError as error:
        raise ExportError(f"checkpoint {name} is quantised by {method}, and {error}") from error
    return {**settings, "quant_method": method, "words": f"{method}, {words}"}


def rounds_activations(settings: Mapping[str, Any]) -> bool:
    """Whether others who run a checkpoint round the inputs of its matrices, too."""
    groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, dict)]
    asked = any(group.get("input_activations") for group in groups)
    return asked or settings["quant_method"] == "fp8" or (settings["quant_method"] == "modelopt" and not groups)


class Dequantised(dict[str, "Stored"]):
    """The tensors of a checkpoint by their names in the unquantised model; none is read before it is asked for."""

    def __init__(self, name: str, files: Iterable[Path], settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.name = name
        self.method = METHODS[settings["quant_method"]]
        self.settings = settings
        self.failure: ExportError | None = None  # of the first tensor that could not be understood
        self._matrices: dict[str, dict[str, str]] = {}  # the tensors of each that is quantised, by their endings
        self._places = {key: file for file in map(_opened, files) for key in file.keys()}  # noqa: SIM118
        for base, parts in _grouped(self._places, self.method).items():
            self._add(base, parts)
        if not self._matrices:
            raise ExportError(
                f"checkpoint {name} says that it is quantised by {settings['quant_method']}, but no tensor is; take "
                "quantization_config out of its config.json"
            )

    def _add(self, base: str, parts: dict[str, str]) -> None:
        """Add one matrix that is held by several tensors, or one tensor that is what it is."""
        method = self.method
        needed = next((needed for needed in method.needs if needed <= parts.keys()), None)
        if needed is not None:
            if extra := sorted(parts.keys() - needed - method.may_have):
                raise ExportError(f"tensor {parts[extra[0]]} of checkpoint {self.name} is not understood")
            self[base + method.whole] = Stored(partial(self._matrix, parts))
            self._matrices[base + method.whole] = parts
            return
        for ending, key in parts.items():
            if ending in ("", ".weight"):
                self[key] = Stored(partial(self._places[key].get_tensor, key))
                self._refuse_integers(key)
            elif ending not in method.may_have:
                raise ExportError(
                    f"tensor {key} of checkpoint {self.name} is there without what belongs to it: "
                    f"{_lacking(base, parts, method)}; download it again"
                )

    def _refuse_integers(self, key: str) -> None:
        kind = self._places[key].get_slice(key).get_dtype()
        if kind not in NUMBERS:
            raise ExportError(
                f"tensor {key} of checkpoint {self.name} is stored as {kind}, and no scales are with it; "
                "download it again"
            )

    @property
    def matrices(self) -> int:
        """How many are quantised."""
        return len(self._matrices)

    def centred(self, name: str) -> Centred | None:
        """Return a matrix as the whole numbers that it is stored as, if its groups are columns in their order."""
        parts = self._matrices.get(name)
        return None if parts is None else self.method.centred(self._read(parts), self.settings)

    def _read(self, parts: dict[str, str]) -> dict[str, Tensor]:
        return {ending: self._places[key].get_tensor(key) for ending, key in parts.items()}

    def _matrix(self, parts: dict[str, str]) -> Tensor:
        try:
            return self.method.matrix(self._read(parts), self.settings)
        except (ExportError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            first = next(iter(parts.values()))
            self.failure = ExportError(f"tensor {first} of checkpoint {self.name} cannot be dequantised: {error}")
            raise self.failure from error


class Stored:
    """A tensor that is read, or made, when it is indexed: transformers reads so what lies in a file."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]


def _opened(file: Path) -> Any:
    return safe_open(file, "pt")


def _grouped(keys: Iterable[str], method: Method) -> dict[str, dict[str, str]]:
    """Put together the tensors whose names differ in their endings alone."""
    endings = sorted(frozenset().union(*method.needs, method.may_have), key=len, reverse=True)
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for key in keys:
        ending = next((ending for ending in endings if key.endswith(ending)), "")
        groups[key.removesuffix(ending)][ending] = key
    return groups


def _lacking(base: str, parts: dict[str, str], method: Method) -> str:
    closest = max(method.needs, key=lambda needed: len(needed & parts.keys()))
    return ", ".join(base + ending for ending in sorted(closest - parts.keys()))
