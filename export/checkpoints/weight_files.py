"""The files that hold a checkpoint's weights: safetensors and nothing else, or a refusal."""

from pathlib import Path, PurePosixPath

from ...engines import ExportError
from .finding import download
from .reading import read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # one file, or what lists several
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def require_weights(name: str, path: Path) -> None:
    """Bring the weights of a model of the Hub, and refuse a checkpoint that has none as safetensors."""
    if not Path(name).is_dir():
        download(name, ["*.safetensors"])
    _refuse_missing_weights(name, path)


def weight_files(name: str, path: Path) -> list[Path]:
    """Return the files of a checkpoint's weights; none where they are no safetensors."""
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if (path / INDEX).is_file():
        shards = read_object(name, path / INDEX).get("weight_map")
        if isinstance(shards, dict):
            return [path / str(shard) for shard in sorted(set(shards.values()))]
    return []


def _refuse_missing_weights(name: str, path: Path) -> None:
    if (path / WEIGHTS).is_file():
        return
    if (path / INDEX).is_file():
        _refuse_missing_shards(name, path)
    else:
        pickled = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickled:
            raise ExportError(
                f"checkpoint {name} has only pickled weights ({pickled[0]}), which may run code when read; "
                "python -m trt_spec.tools.making.convert_pickle makes safetensors of them and runs none"
            )
        raise ExportError(f"checkpoint {name} has no {WEIGHTS}, expected the weights as safetensors")


def _refuse_missing_shards(name: str, path: Path) -> None:
    shards = read_object(name, path / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise ExportError(
            f"{INDEX} of checkpoint {name} has no weight_map from tensors to files, expected one as transformers "
            "writes it; download it again"
        )
    for shard in sorted(set(shards.values())):
        place = PurePosixPath(shard)
        if place.is_absolute() or ".." in place.parts:
            raise ExportError(
                f"{INDEX} of checkpoint {name} lists {shard!r}, which lies outside the checkpoint; it is refused"
            )
        if place.suffix != ".safetensors":
            raise ExportError(f"{INDEX} of checkpoint {name} lists {shard!r}, expected safetensors; convert it to them")
        if not (path / shard).is_file():
            raise ExportError(f"checkpoint {name} lacks the shard {shard!r} that {INDEX} lists; download it again")
