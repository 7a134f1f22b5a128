"""A bundle: its models and tokenizer as the manifest lists them, written by export and opened by the runtime."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..contract import (
    CALL,
    FEATURES,
    GRANULE,
    MAX_DRAFT_LENGTH,
    SLACK,
    SOURCE,
    Contract,
    EncoderContract,
    VisionContract,
)
from ..errors import BundleError, ContractError, RequestError
from .layout import (
    ADAPTED,
    COSTS,
    DRAFT,
    DRAFTS,
    FOREIGN,
    FUSED,
    GRAPH,
    HEAD,
    KINDS,
    MANIFEST,
    PLANS,
    TABLES,
    TARGET,
    TOKENIZER,
    VISION,
    WEIGHTS,
    shard_folder,
)
from .manifest import FORMAT, content_hash, measure, read_manifest, refuse_escape, require_unchanged, require_whole


@dataclass(frozen=True)
class Masks:
    """How a draft says all tokens of a round in one pass: after the last committed token it reads masks."""

    token: int  # that stands for one not known yet
    count: int | None = None  # in each pass; None: as many as what is asked for needs
    repeats: bool = False  # the last committed token is read once more before them
    first: int = 0  # how far after the last committed token lies the one that says the first proposal

    @property
    def most(self) -> int | None:
        """How many proposals it can make."""
        return None if self.count is None else self.count + int(self.repeats) + 1 - self.first

    def reads(self, proposals: int) -> int:
        """How many tokens it reads after the last committed one, to say so many proposals."""
        masks = proposals - 1 if self.count is None else self.count
        return masks + int(self.repeats)


@dataclass(frozen=True)
class OwnTokens:
    """The facts about a draft whose tokens are not the target's, beside its tokenizer and its tables."""

    vocab_size: int  # token ids are 0 … vocab_size - 1; logits beyond are padding
    common: int  # how many tokens the target has, too
    drafter: str  # the one that runs it if nobody says which
    opening: tuple[int, ...] = ()  # what its texts begin with
    roles: tuple[tuple[int, int], ...] = ()  # special tokens of the target, and which of the draft mean the same
    acceptance: dict[str, dict[str, float]] = field(default_factory=dict)  # expected, by drafter and temperature


@dataclass(frozen=True)
class ModelEntry:
    """One model of a bundle: where it came from, what its graph promises, and how it was checked."""

    kind: str  # one of KINDS
    name: str
    architecture: str
    parameters: int
    contract: Contract
    weights: str = "none"  # how they are quantised
    check: dict[str, Any] = field(default_factory=dict)  # empty: exported with --no-check
    dequantised: str = ""  # how the checkpoint was quantised, if it was
    masks: Masks | None = None  # of a draft that can propose in one pass
    tokens: OwnTokens | None = None  # of a draft that has others than the target
    look_aheads: int = 0  # ids after its vocabulary that a target reads as places still to come (PaSS)

    def __post_init__(self) -> None:
        if type(self.look_aheads) is not int or not 0 <= self.look_aheads <= MAX_DRAFT_LENGTH:
            raise ValueError(f"look_aheads are {self.look_aheads!r}, expected 0 to {MAX_DRAFT_LENGTH}")


@dataclass(frozen=True)
class EncoderEntry:
    """One encoder of a bundle: where it came from, what its graph promises, and how it was checked."""

    name: str
    parameters: int
    contract: EncoderContract
    weights: str = "none"  # how they are quantised
    check: dict[str, Any] = field(default_factory=dict)  # empty: exported with --no-check


@dataclass(frozen=True)
class VisionEntry:
    """The graph that sees for the target: where it came from, what it promises, and how it was checked."""

    name: str
    parameters: int
    contract: VisionContract
    weights: str = "none"  # how they are quantised
    check: dict[str, Any] = field(default_factory=dict)  # empty: exported with --no-check


@dataclass(frozen=True)
class Speech:
    """How a decoder writes down what was heard, beside what its tokens say by their names."""

    multilingual: bool
    begin_unsaid: tuple[int, ...] = ()  # tokens that may not be the first
    latest_first: int | None = None  # the highest number of a time that a text may begin with


ID_LISTS = ("eos_token_ids", "start_ids", "unsaid_ids", "forced_end_ids")


@dataclass(frozen=True)
class TokenizerEntry:
    """The numbers and the template that the runtime needs beside the tokenizer's file."""

    vocab_size: int  # token ids are 0 … vocab_size - 1; logits beyond are padding
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None = None
    sampling: dict[str, float] = field(default_factory=dict)  # what its makers recommend, by names of SamplingParams
    start_ids: tuple[int, ...] = ()  # what an output begins with, if it has a source
    unsaid_ids: tuple[int, ...] = ()  # tokens that the model shall never say
    speech: Speech | None = None  # of a model that hears
    forced_end_ids: tuple[int, ...] = ()  # of which one ends an output that becomes as long as it may

    def __post_init__(self) -> None:
        if type(self.vocab_size) is not int or self.vocab_size < 1:
            raise ValueError(f"tokenizer vocab_size is {self.vocab_size!r}, expected a positive integer")
        for name in ID_LISTS:
            if not all(type(token) is int and token >= 0 for token in getattr(self, name)):
                raise ValueError(f"{name} are {getattr(self, name)!r}, expected token ids")


@dataclass(frozen=True)
class Bundle:
    """A verified bundle directory."""

    path: Path
    models: dict[str, ModelEntry]  # by name, which is also the name of the model's folder
    tokenizer: TokenizerEntry
    made_by: dict[str, str]  # library name to version
    files: dict[str, dict[str, Any]]  # relative path to {"bytes", "sha256"}
    longest: int | None = None  # fewer tokens than the models allow, if that was asked for
    encoders: dict[str, EncoderEntry] = field(default_factory=dict)  # by name, which is also that of the folder
    vision: VisionEntry | None = None  # if the target sees

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the target, of all drafts and of all heads, in this order."""
        return (next(name for name, model in self.models.items() if model.kind == TARGET), *self.drafts, *self.heads)

    @property
    def target(self) -> ModelEntry:
        return self.models[self.names[0]]

    @property
    def drafts(self) -> tuple[str, ...]:
        """The names of all drafts, in the order in which drafters are named after them."""
        return tuple(name for name, model in self.models.items() if model.kind == DRAFT)

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of all drafts that read states of the target, each that of the drafter that runs it."""
        return tuple(name for name, model in self.models.items() if model.kind == HEAD)

    @property
    def foreign(self) -> str | None:
        """The name of the draft that has tokens of its own, if there is one."""
        return next((name for name, model in self.models.items() if model.kind == FOREIGN), None)

    def vocab_size(self, name: str) -> int:
        """Return how many tokens a model has; its logits beyond are padding."""
        own = self.models[name].tokens
        return self.tokenizer.vocab_size if own is None else own.vocab_size

    def features(self, head: str) -> slice:
        """Return which of the target's features a head reads: they lie side by side, in the order of the heads."""
        sizes = {name: self.models[name].contract.of_kind(CALL)[0].shape[0] for name in self.heads}
        begin = sum(size for name, size in sizes.items() if self.heads.index(name) < self.heads.index(head))
        return slice(begin, begin + sizes[head])

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of all graphs: of models, of encoders, and of the one that sees."""
        return (*self.models, *self.encoders, *([] if self.vision is None else [VISION]))

    @property
    def encoder(self) -> EncoderEntry | None:
        """The encoder that the target reads, if its texts have sources."""
        return next((one for one in self.encoders.values() if self.names[0] in one.contract.feeds), None)

    def longest_source(self, name: str) -> int:
        """Return how many entries of a source this model can have, 0 if it reads none."""
        return max((one.contract.longest for one in self.encoders.values() if name in one.contract.feeds), default=0)

    @property
    def draft(self) -> ModelEntry | None:
        """The first draft."""
        return self.models[self.drafts[0]] if self.drafts else None

    def graph(self, name: str) -> Path:
        return self.path / name / GRAPH

    def weight_bytes(self, name: str) -> int:
        return int(self.files[f"{name}/{WEIGHTS}"]["bytes"])

    @property
    def tokenizer_file(self) -> Path:
        return self.path / TOKENIZER

    @property
    def max_length(self) -> int:
        return self.longest or self._positions

    @property
    def _positions(self) -> int:
        return min(model.contract.max_length for model in self.models.values() if model.tokens is None)

    @property
    def capacity(self) -> int:
        """Entries of a cache that holds the longest sequence and what a call may write past it."""
        return _with_slack(self._positions)

    def capacity_of(self, name: str) -> int:
        """Entries of that of one model: a draft with tokens of its own may need more than the others."""
        model = self.models[name]
        return self.capacity if model.tokens is None else _with_slack(model.contract.max_length)

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

    @classmethod
    def read(cls, path: Path) -> "Bundle":
        """Read what a manifest says, and refuse one that cannot be true; the files themselves are not read."""
        fields = read_manifest(path)
        try:
            files = dict(fields["files"])
            bundle = cls(
                path=path,
                models={str(name): _model(entry) for name, entry in fields["models"].items()},
                tokenizer=_tokenizer(fields["tokenizer"]),
                made_by=dict(fields["made_by"]),
                files=files,
                encoders={str(name): _encoder(entry) for name, entry in fields.get("encoders", {}).items()},
                vision=_vision(fields[VISION]) if VISION in fields else None,
            )
            expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
        except (KeyError, TypeError, ValueError, AttributeError, ContractError) as error:
            raise BundleError(
                f"{path / MANIFEST} is damaged ({type(error).__name__}: {error}); export the bundle again"
            ) from error
        if (kinds := [model.kind for model in bundle.models.values()]).count(TARGET) != 1:
            raise BundleError(
                f"{path / MANIFEST} lists models of the kinds {kinds}, expected one target; export it again"
            )
        if len(bundle.drafts) > len(DRAFTS):
            raise BundleError(
                f"{path / MANIFEST} lists {len(bundle.drafts)} drafts, expected at most {len(DRAFTS)}; export fewer"
            )
        read = sum(sum(state.shape) for name in bundle.heads for state in bundle.models[name].contract.of_kind(CALL))
        kept = sum(state.shape[1] for state in bundle.target.contract.states if state.name == FEATURES)
        if bundle.heads and read != kept:
            raise BundleError(
                f"{path / MANIFEST} is damaged: its heads read {read} features of a token, its target keeps {kept}; "
                "export the bundle again"
            )
        for name, model in bundle.models.items():
            if model.contract.vocab_size < bundle.vocab_size(name):
                raise BundleError(
                    f"{path / MANIFEST} is damaged: {model.name} has logits for {model.contract.vocab_size} tokens, "
                    f"the tokenizer has {bundle.vocab_size(name)}; export the bundle again"
                )
        own = [model.kind for model in bundle.models.values() if model.tokens is not None]
        if own not in ([], [FOREIGN]) or len(own) != kinds.count(FOREIGN):
            raise BundleError(
                f"{path / MANIFEST} is damaged: of models of the kinds {kinds} {len(own)} say that they have tokens of "
                f"their own, expected the {FOREIGN} one; export the bundle again"
            )
        for name, model in bundle.models.items():
            fed = [one.contract.feeds[name] for one in bundle.encoders.values() if name in one.contract.feeds]
            if [tuple(model.contract.of_kind(SOURCE))] != (fed or [()]):
                raise BundleError(
                    f"{path / MANIFEST} is damaged: {len(fed)} encoders feed the {name}, whose states of a source they "
                    "do not give; export the bundle again"
                )
        made = 0 if bundle.vision is None else bundle.vision.contract.size
        if bundle.target.contract.image_size != made:
            raise BundleError(
                f"{path / MANIFEST} is damaged: entries of images have {made} numbers, the target reads "
                f"{bundle.target.contract.image_size}; export the bundle again"
            )
        for name in [
            TOKENIZER,
            *(f"{name}/{file}" for name in bundle.folders for file in (GRAPH, WEIGHTS)),
            *(f"{bundle.foreign}/{file}" for file in (TOKENIZER, TABLES) if bundle.foreign is not None),
            *(
                f"{shard_folder(Path(name), rank).as_posix()}/{file}"
                for name, model in bundle.models.items()
                for rank in range(1, model.contract.shards)
                for file in (GRAPH, WEIGHTS)
            ),
            *(f"{name}/{ADAPTED}{GRAPH}" for name, model in bundle.models.items() if model.contract.adapters),
            *(f"{name}/{ADAPTED}{GRAPH}" for name, one in bundle.encoders.items() if one.contract.adapters),
        ]:
            if name not in expected:
                raise BundleError(f"{path / MANIFEST} does not list {name}, which every bundle has; export it again")
        for name in (*bundle.models, *bundle.encoders):
            for file in (FUSED, f"{ADAPTED}{FUSED}"):
                if f"{name}/{file}" not in expected and (path / name / file).exists():
                    raise BundleError(
                        f"{path / MANIFEST} does not list {name}/{file}, which is there; remove that file"
                    )
        return bundle


def _model(fields: dict[str, Any]) -> ModelEntry:
    if fields["kind"] not in KINDS:
        raise ValueError(f"a model of the kind {fields['kind']!r}, expected one of {', '.join(KINDS)}")
    masks = Masks(**fields["masks"]) if fields.get("masks") else None
    tokens = _own_tokens(fields["tokens"]) if fields.get("tokens") else None
    contract = Contract.from_json(fields["contract"])
    return ModelEntry(**fields | {"contract": contract, "masks": masks, "tokens": tokens})


def _own_tokens(fields: dict[str, Any]) -> OwnTokens:
    roles = tuple((int(ours), int(own)) for ours, own in fields["roles"])
    return OwnTokens(**fields | {"roles": roles, "opening": tuple(map(int, fields["opening"]))})


def _with_slack(length: int) -> int:
    return -(-(length + SLACK) // GRANULE) * GRANULE


def _encoder(fields: dict[str, Any]) -> EncoderEntry:
    return EncoderEntry(**fields | {"contract": EncoderContract.from_json(fields["contract"])})


def _vision(fields: dict[str, Any]) -> VisionEntry:
    return VisionEntry(**fields | {"contract": VisionContract.from_json(fields["contract"])})


def _tokenizer(fields: dict[str, Any]) -> TokenizerEntry:
    lists = {name: tuple(fields.get(name, ())) for name in ID_LISTS}
    speech = fields.get("speech")
    if speech is not None:
        speech = Speech(**speech | {"begin_unsaid": tuple(speech["begin_unsaid"])})
    return TokenizerEntry(**fields | lists | {"speech": speech})
