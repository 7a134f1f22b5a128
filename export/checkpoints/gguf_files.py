"""Spare transformers parsing a GGUF file for each thing that it wants of it: a large vocabulary takes seconds."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

UNQUANTISED = ("F32", "F16", "BF16")
_read: dict[tuple[str, int, int], Any] = {}  # the reader of the file that was parsed last
_types: dict[tuple[str, int, int], str] = {}  # in which most bytes of each file are stored


@contextmanager
def parsed_once() -> Iterator[None]:
    """Give transformers the reader that it had of this very file before, and keep its progress bar quiet."""
    import gguf
    import transformers.modeling_gguf_pytorch_utils as theirs

    parse = gguf.GGUFReader

    def reader(path: Any, *arguments: Any) -> Any:
        key = _key(path)
        if arguments or key not in _read:
            found = parse(path, *arguments)
            if arguments:
                return found
            _read.clear()
            _read[key], _types[key] = found, _main_type(found)
        return _read[key]

    with (
        _replaced(gguf, "GGUFReader", reader),
        _replaced(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),  # which is asked for by each module
        _replaced(theirs, "tqdm", partial(theirs.tqdm, disable=True)),
    ):
        yield


def main_type(file: Path) -> str:
    """Name the type in which most bytes of a file are stored."""
    if _key(file) not in _types:
        import gguf

        with parsed_once():
            gguf.GGUFReader(file)
    return _types[_key(file)]


def _main_type(reader: Any) -> str:
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    return sizes.most_common(1)[0][0]


def _key(file: Path | str) -> tuple[str, int, int]:
    about = Path(file).stat()
    return str(file), about.st_size, about.st_mtime_ns


def forget() -> None:
    """Free what is kept of the file."""
    _read.clear()


@contextmanager
def _replaced(module: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    own = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, own)
