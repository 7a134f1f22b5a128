"""A bundle: its models and tokenizer as the manifest lists them, written by export and opened by the runtime."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import BundleError, ContractError, RequestError
from .consistency import require_consistent
from .contents import Contents
from .entries import read_encoder, read_model, read_tokenizer, read_vision
from .layout import COSTS, MANIFEST, PLANS, VISION
from .manifest import FORMAT, content_hash, measure, read_manifest, refuse_escape, require_unchanged, require_whole


@dataclass(frozen=True)
class Bundle(Contents):
    """A verified bundle directory."""

    def limited(self, longest: int) -> "Bundle":
        """Return this bundle for sequences of at most so many tokens."""
        if longest > self.max_length:
            raise RequestError(
                f"sequences of {longest} tokens are asked for, the models allow {self.max_length}; ask for less"
            )
        return replace(self, longest=longest)

    def save(self) -> None:
        """Hash every file of the bundle below `path` and write the manifest."""
        names = sorted(
            file.relative_to(self.path).as_posix()
            for file in self.path.rglob("*")
            if file.is_file() and file.name != MANIFEST and file.relative_to(self.path).parts[0] not in (PLANS, COSTS)
        )
        measured = replace(self, files={name: measure(self.path / name) for name in names})
        (self.path / MANIFEST).write_text(measured.manifest(), encoding="utf-8")

    def manifest(self) -> str:
        """The text of the manifest, which lists `files`."""
        fields = {
            "format": FORMAT,
            "made_by": self.made_by,
            "models": {
                name: asdict(model) | {"contract": model.contract.to_json()} for name, model in self.models.items()
            },
            "encoders": {
                name: asdict(encoder) | {"contract": encoder.contract.to_json()}
                for name, encoder in self.encoders.items()
            },
            "tokenizer": asdict(self.tokenizer),
            "files": self.files,
        }
        if self.vision is not None:
            fields[VISION] = asdict(self.vision) | {"contract": self.vision.contract.to_json()}
        sealed = fields | {"sha256": content_hash(fields)}
        return json.dumps(sealed, indent=1) + "\n"

    @classmethod
    def open(cls, path: Path | str) -> "Bundle":
        """Read and verify a bundle; refuse by name whatever is missing, damaged, foreign or newer."""
        bundle = cls.read(Path(path))
        bundle.require_files()
        with ThreadPoolExecutor(2) as pool:
            list(
                pool.map(lambda name: require_unchanged(bundle.path, name, bundle.files[name]["sha256"]), bundle.files)
            )
        return bundle

    def require_files(self) -> None:
        """Refuse a file that the manifest lists and that is missing, cut off or outside; what it holds is not read."""
        for name in self.files:
            refuse_escape(self.path, name)
        for name, entry in self.files.items():
            require_whole(self.path, name, int(entry["bytes"]))

    def require_same(self) -> None:
        """Refuse to read on where another bundle has taken the place of this one."""
        graphs = {*self.models, *self.encoders, VISION}  # to which no file is ever added
        own = {name: entry for name, entry in self.files.items() if name.split("/")[0] in graphs}
        if own and not own.items() <= self.read(self.path).files.items():
            raise BundleError(f"bundle {self.path} was replaced after it was read; open it again")

    @classmethod
    def read(cls, path: Path) -> "Bundle":
        """Read what a manifest says, and refuse one that cannot be true; the files themselves are not read."""
        fields = read_manifest(path)
        try:
            bundle = cls(
                path=path,
                models={str(name): read_model(entry) for name, entry in fields["models"].items()},
                tokenizer=read_tokenizer(fields["tokenizer"]),
                made_by=dict(fields["made_by"]),
                files={
                    name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
                    for name, entry in fields["files"].items()
                },
                encoders={str(name): read_encoder(entry) for name, entry in fields.get("encoders", {}).items()},
                vision=read_vision(fields[VISION]) if VISION in fields else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError, ContractError) as error:
            raise BundleError(
                f"{path / MANIFEST} is damaged ({type(error).__name__}: {error}); export the bundle again"
            ) from error
        require_consistent(bundle)
        return bundle
