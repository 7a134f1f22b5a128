"""What a manifest says of each model, encoder and tokenizer of a bundle."""

from dataclasses import dataclass, field
from typing import Any

from ..contract import MAX_DRAFT_LENGTH, Contract, EncoderContract, VisionContract
from .layout import KINDS


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


def read_model(fields: dict[str, Any]) -> ModelEntry:
    """Read what a manifest says of a model."""
    if fields["kind"] not in KINDS:
        raise ValueError(f"a model of the kind {fields['kind']!r}, expected one of {', '.join(KINDS)}")
    masks = Masks(**fields["masks"]) if fields.get("masks") else None
    tokens = _own_tokens(fields["tokens"]) if fields.get("tokens") else None
    contract = Contract.from_json(fields["contract"])
    return ModelEntry(**fields | {"contract": contract, "masks": masks, "tokens": tokens})


def _own_tokens(fields: dict[str, Any]) -> OwnTokens:
    roles = tuple((int(ours), int(own)) for ours, own in fields["roles"])
    return OwnTokens(**fields | {"roles": roles, "opening": tuple(map(int, fields["opening"]))})


def read_encoder(fields: dict[str, Any]) -> EncoderEntry:
    """Read what a manifest says of an encoder."""
    return EncoderEntry(**fields | {"contract": EncoderContract.from_json(fields["contract"])})


def read_vision(fields: dict[str, Any]) -> VisionEntry:
    """Read what a manifest says of the graph that sees."""
    return VisionEntry(**fields | {"contract": VisionContract.from_json(fields["contract"])})


def read_tokenizer(fields: dict[str, Any]) -> TokenizerEntry:
    """Read what a manifest says of the tokenizer."""
    lists = {name: tuple(fields.get(name, ())) for name in ID_LISTS}
    speech = fields.get("speech")
    if speech is not None:
        speech = Speech(**speech | {"begin_unsaid": tuple(speech["begin_unsaid"])})
    return TokenizerEntry(**fields | lists | {"speech": speech})
