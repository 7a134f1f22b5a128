"""A checkpoint's processor of images: its own settings, its tokenizer's, and transformers' processor of pixels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...engines import ExportError
from ...engines.errors import one_line


@dataclass(frozen=True)
class Processor:
    """What a checkpoint says of its processor."""

    name: str  # of the checkpoint
    tokenizer: Tokenizer
    own: Mapping[str, Any]  # its own settings
    of_tokens: Mapping[str, Any]  # those of its tokenizer
    pixels: Any  # transformers' image processor

    def token(self, key: str, usual: str) -> tuple[str, int]:
        """Return a special token that the tokenizer may name, and its id."""
        more = self.of_tokens.get("extra_special_tokens")
        named = self.of_tokens.get(key) or (more.get(key) if isinstance(more, dict) else None) or usual
        text = str(named.get("content") if isinstance(named, dict) else named)
        number = self.tokenizer.token_to_id(text)
        if number is None:
            raise ExportError(
                f"the tokenizer of checkpoint {self.name} lacks {text!r}, which stands for images; take the tokenizer "
                "that belongs to the model"
            )
        return text, int(number)

    def between(self, before: str, text: str, after: str) -> list[int]:
        """Return the tokens of a text that stands between two special tokens."""
        found: list[int] = self.tokenizer.encode(before + text + after, add_special_tokens=False).ids
        return found[1:-1]

    def count(self, key: str, usual: int | None = None) -> int:
        number = self.own.get(key, usual)
        if type(number) is not int:
            raise ExportError(
                f"processor_config.json of checkpoint {self.name} has {key} {number!r}, expected a number; "
                "download it again"
            )
        return number

    def size(self, key: str = "size") -> tuple[int, int] | None:
        """Return a height and a width, if that is how a size is given."""
        given = getattr(self.pixels, key)
        return (given.height, given.width) if given is not None and given.height and given.width else None

    def refuse(self, key: str, expected: str) -> ExportError:
        value = getattr(self.pixels, key)
        return ExportError(
            f"the image processor of checkpoint {self.name} has {key} {value!r}, expected {expected}; this version "
            "reads no other images"
        )


def load_pixels(name: str, path: Path) -> Any:
    """Load transformers' image processor that works with Pillow, with its defaults."""
    try:
        import PIL  # noqa: F401  # transformers says that a class lacks it, which names no extra of ours
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise ExportError(f"to export how {name} reads images needs Pillow; pip install 'trt-spec[images]'") from error
    except Exception as error:  # a strange file makes transformers raise anything
        raise ExportError(f"the image processor of checkpoint {name} cannot be read: {one_line(error)}") from error


def scaling_of(pixels: Any) -> dict[str, Any]:
    def colours(value: Any) -> list[float]:
        return [float(each) for each in (value if isinstance(value, list | tuple) else [value] * 3)]

    normalised = bool(pixels.do_normalize)
    return {
        "resample": int(pixels.resample),
        "factor": float(pixels.rescale_factor) if pixels.do_rescale else None,
        "mean": colours(pixels.image_mean) if normalised else None,
        "std": colours(pixels.image_std) if normalised else None,
    }
