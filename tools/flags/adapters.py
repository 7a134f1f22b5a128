"""The flags that bring LoRA adapters to a bundle that has room for them."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...engines import ENGINES, Bundle, RequestError
from .groups import SAMPLING, group

if TYPE_CHECKING:
    from ...runtime import Decoder

CONFIG = "adapter_config.json"


def add_adapter_flag(parser: argparse.ArgumentParser) -> None:
    group(parser, SAMPLING).add_argument(
        "--adapter", metavar="DIR", type=Path, help="answer with this LoRA adapter, as PEFT writes it"
    )


def named_adapter(text: str) -> tuple[str, Path]:
    """Read NAME=DIR."""
    name, found, folder = text.partition("=")
    if not (found and name.strip() and folder):
        raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=DIR")
    return name, Path(folder)


def refuse_adapters(folders: Iterable[Path], bundle: Path, engine: str) -> None:
    """Refuse adapters that are not there, and a bundle or an engine without room for them, before libraries load."""
    given = list(folders)
    for folder in given:
        if not folder.exists():
            raise RequestError(f"adapter {folder} does not exist, expected the folder of one as PEFT writes it")
        if not (folder / CONFIG).is_file():
            raise RequestError(f"{folder} has no {CONFIG}, expected a LoRA adapter as PEFT writes it")
    if given:
        refuse_room(bundle, engine)


def refuse_room(bundle: Path, engine: str) -> None:
    """Refuse a bundle or an engine that has no room for adapters."""
    if Bundle.read(bundle).target.contract.adapters is None:
        raise RequestError(f"bundle {bundle} has no room for adapters; export it with --adapters")
    if engine in ENGINES and not ENGINES[engine].adapters:
        able = " or ".join(name for name, one in ENGINES.items() if one.adapters)
        raise RequestError(f"engine {engine} runs no adapters; use engine {able}")


def loaded_adapter(decoder: "Decoder", folder: Path | None) -> str | None:
    """Load what --adapter names, under the name of its folder."""
    if folder is None:
        return None
    name = folder.resolve().name
    decoder.load_adapter(name, folder)
    return name
