"""Reads how the makers of a checkpoint recommend to sample. It needs no torch, so that a flag is refused at once."""

from pathlib import Path
from typing import Any

from .finding import gguf_file
from .reading import read_object

FILE = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # as that file calls them


def recommended_sampling(generation: dict[str, Any]) -> dict[str, float]:
    """Return how the model shall be sampled, if its generation_config.json says so."""
    given: dict[str, Any] = {name: generation.get(name) for name in SAMPLING}
    found = {name: value for name, value in given.items() if type(value) in (int, float)}
    return found | {"temperature": 0.0} if generation.get("do_sample") is False else found


def recommended_here(name: str) -> dict[str, Any] | None:
    """Return that of a folder or a file; None for a name on the Hub."""
    place = Path(name)
    if not place.exists():
        return None
    file = place / FILE
    return recommended_sampling(read_object(name, file) if gguf_file(name) is None and file.is_file() else {})
