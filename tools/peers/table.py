"""The runtimes that bench can measure in turn with this one: a file and a row each."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...engines import Bundle
from ..flags.compared import PEERS as NAMES
from . import against_openvino, against_transformers
from .apart import Apart, Opened


@dataclass(frozen=True)
class Peer:
    name: str
    package: str
    # Finds its models by role, and refuses what would not compare before anything is measured.
    find: Callable[[argparse.Namespace, Bundle, str], Mapping[str, Path]]
    # Opens them for prompts that are at most so many tokens long with all that is written.
    open: Callable[[argparse.Namespace, Bundle, Mapping[str, Path], int], Opened]

    def apart(self, arguments: argparse.Namespace, bundle: Bundle, folders: Mapping[str, Path], longest: int) -> Apart:
        """Open it in a process of its own."""
        return Apart(self.name, self.open, arguments, bundle, folders, longest)


PEERS = {
    "hf": Peer(
        NAMES["hf"],
        "transformers",
        against_transformers.compared_checkpoints,
        against_transformers.open_checkpoints,
    ),
    "openvino": Peer(
        NAMES["openvino"],
        "openvino-genai",
        against_openvino.exported_models,
        against_openvino.open_models,
    ),
}
