"""What a manifest says must agree with itself: its models with one another, and its files with its models."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..contract import CALL, FEATURES, SOURCE, Contract, Part, State
from ..errors import BundleError
from .contents import Contents
from .layout import ADAPTED, DRAFTS, FOREIGN, FUSED, GRAPH, MANIFEST, TABLES, TARGET, TOKENIZER, WEIGHTS, shard_folder


def require_consistent(held: Contents) -> None:
    """Refuse by name a manifest that cannot be true, and files that it leaves out."""
    _require_kinds(held)
    for wrong in _disagreements(held):
        raise BundleError(f"{held.path / MANIFEST} is damaged: {wrong}; export the bundle again")
    for name in _needed(held):
        if name not in held.files:
            raise BundleError(f"{held.path / MANIFEST} does not list {name}, which every bundle has; export it again")
    for name in (f"{folder}/{file}" for folder in (*held.models, *held.encoders) for file in (FUSED, ADAPTED + FUSED)):
        if name not in held.files and (held.path / name).exists():
            raise BundleError(f"{held.path / MANIFEST} does not list {name}, which is there; remove that file")


def _require_kinds(held: Contents) -> None:
    kinds = [model.kind for model in held.models.values()]
    if kinds.count(TARGET) != 1:
        raise BundleError(
            f"{held.path / MANIFEST} lists models of the kinds {kinds}, expected one target; export it again"
        )
    if len(held.drafts) > len(DRAFTS):
        raise BundleError(
            f"{held.path / MANIFEST} lists {len(held.drafts)} drafts, expected at most {len(DRAFTS)}; export fewer"
        )


def _disagreements(held: Contents) -> Iterator[str]:
    models, encoders = held.models, held.encoders.values()
    read = sum(sum(state.shape) for name in held.heads for state in models[name].contract.of_kind(CALL))
    kept = sum(state.shape[1] for state in held.target.contract.states if state.name == FEATURES)
    if held.heads and read != kept:
        yield f"its heads read {read} features of a token, its target keeps {kept}"
    for name, model in models.items():
        if model.contract.vocab_size < held.vocab_size(name):
            yield (
                f"{model.name} has logits for {model.contract.vocab_size} tokens, the tokenizer has "
                f"{held.vocab_size(name)}"
            )
    kinds = [model.kind for model in models.values()]
    own = [model.kind for model in models.values() if model.tokens is not None]
    if own not in ([], [FOREIGN]) or len(own) != kinds.count(FOREIGN):
        yield (
            f"of models of the kinds {kinds} {len(own)} say that they have tokens of their own, expected the {FOREIGN} "
            "one"
        )
    for name, model in models.items():
        fed = [one.contract.feeds[name] for one in encoders if name in one.contract.feeds]
        if [tuple(model.contract.of_kind(SOURCE))] != ([_in_shards(one, model.contract) for one in fed] or [()]):
            yield f"{len(fed)} encoders feed the {name}, whose states of a source they do not give"
    made = 0 if held.vision is None else held.vision.contract.size
    if held.target.contract.image_size < made:
        yield f"entries of images have {made} numbers, the target reads {held.target.contract.image_size}"
    for name, model in held.models.items():
        if model.contract.image_size > made:
            yield f"entries of images have {made} numbers, the {name} reads {model.contract.image_size}"


def _in_shards(fed: tuple[State, ...], contract: Contract) -> tuple[State, ...]:
    """Return states with the heads of a shard, where the contract of one has fewer."""
    own = {state.name: state.shape[0] for state in contract.states}
    found = []
    for state in fed:
        heads, size = state.shape
        shares = heads, Part(heads, heads).share(contract.shards)
        kept = next((each for each in shares if each == own.get(state.name)), heads)
        found.append(replace(state, shape=(kept, size)))
    return tuple(found)


def _needed(held: Contents) -> Iterator[str]:
    """The files that every bundle with such models has."""
    yield TOKENIZER
    folders, adapted = list(held.folders), [name for name, one in held.encoders.items() if one.contract.adapters]
    for name, model in held.models.items():
        shards = [shard_folder(Path(name), rank).as_posix() for rank in range(model.contract.shards)]
        folders += shards[1:]
        adapted += shards if model.contract.adapters else []
    yield from (f"{folder}/{file}" for folder in folders for file in (GRAPH, WEIGHTS))
    if held.foreign is not None:
        yield from (f"{held.foreign}/{file}" for file in (TOKENIZER, TABLES))
    yield from (f"{name}/{ADAPTED}{GRAPH}" for name in adapted)
