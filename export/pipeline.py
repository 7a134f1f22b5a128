"""Make a checked bundle of a target's checkpoint and those of its drafts, or say in one sentence why not."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engines import Bundle, Contract, EngineError, ExportError, Masks, ModelEntry, PairError
from ..engines.bundle import DRAFT, DRAFTS, FOREIGN, FUSED, GRAPH, HEAD, TARGET, TOKENIZER, WEIGHTS, write_tables
from .checking.bigram import bigram_overlap
from .checking.check import Reference, check_graph, make_reference, worse
from .checking.oracle import behind_first, branch_features
from .checking.quality import LOGITS, LONGEST, Sample, checkpoint_logits, overlap
from .checkpoints.agreement import agreed_length, difference, reads_alone, refuse_unequal
from .checkpoints.checkpoint import Checkpoint, find_config, kept_matrices, load_model, open_checkpoint
from .checkpoints.vocabulary import Vocabulary, read_vocabulary
from .foreign import translate
from .kinds import (
    HeadCheckpoint,
    LoadedHead,
    LookAheads,
    check_head,
    open_head,
    open_look_aheads,
    with_features,
)
from .passes.quantise import AUTO, Quantisation, nothing_known
from .sources.examples import example_sources
from .writing.aside import built_aside
from .writing.encoders import export_encoders, refuse_unlike_sources
from .writing.graph import WIDE, build_graph, write_fused, write_graph
from .writing.quiet import quiet_libraries
from .writing.report import ExportReport, ModelReport

MADE_BY = ("trt-spec", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")
SAMPLE = Path(__file__).with_name("sample.txt")
TEMPERATURES = (0.0, 1.0)
DTYPES = ("float32", "float16", "bfloat16")
UNFUSED = ("int8", "nvfp4")  # the one needs heads stacked, for the other ONNX Runtime has no kernels
SPREAD = 2  # tokens that a draft with its own may have for each of the target's
MEASURED = 4096  # tokens of the text on which a head is measured
BLOCKS_OF = {  # by how most of a file is stored
    **{f"GGUF, {kind}": "int4" for kind in ("Q4_0", "Q4_1", "Q4_K")},
    **{f"GGUF, {kind}": "int8" for kind in ("Q8_0", "Q6_K")},
}
Progress = Callable[[str], None]


def export_bundle(
    target: str | Path,
    out: str | Path,
    draft: str | Path | Sequence[str | Path] | None = None,
    max_length: int | None = None,
    dtype: str = "float32",
    weights: Quantisation = WIDE,
    draft_weights: Quantisation = WIDE,
    text: str | None = None,
    check: bool = True,
    progress: Progress = lambda stage: None,
    lora: str | Path | None = None,
    draft_lora: Sequence[str | Path] = (),
) -> ExportReport:
    """Write the bundle `out`, whole or not at all; an existing bundle there is replaced at the very end.

    Several drafts become models of their own, draft, draft2 and so on, all with `draft_weights`, and so do heads, which
    have the names of their kinds. LoRA adapters are merged into target and drafts, in their order.
    """
    if dtype not in DTYPES:
        raise ExportError(f"dtype is {dtype!r}, expected {', '.join(DTYPES)}")
    if check and find_spec("onnxruntime") is None:
        raise ExportError(
            "the check needs ONNX Runtime, which is not installed; pip install 'trt-spec[cpu]' or export unchecked"
        )
    drafts, heads, look_aheads = _told_apart(
        target, [] if draft is None else [draft] if isinstance(draft, str | Path) else draft
    )
    if len(drafts) > len(DRAFTS):
        raise ExportError(f"there are {len(drafts)} drafts, expected at most {len(DRAFTS)}; leave the others out")
    if len(draft_lora) > len(drafts):
        raise ExportError(f"there are {len(draft_lora)} adapters for {len(drafts)} drafts; name one for each at most")
    begun = time.perf_counter()
    with quiet_libraries(), _disk_errors(out), built_aside(Path(out)) as folder:
        fetching = "" if Path(target).exists() else f", and fetching {target} unless it is here"
        progress(f"reading configurations and tokenizers{fetching}")
        adapters = [lora, *draft_lora, *[None] * len(drafts)]
        opened = [open_checkpoint(*each) for each in zip([target, *drafts], adapters, strict=False)]
        read = [read_vocabulary(checkpoint) for checkpoint in opened]
        roles = _roles(opened, read)
        checkpoints, vocabularies = dict(zip(roles, opened, strict=True)), dict(zip(roles, read, strict=True))
        joining = [*heads.values(), *([look_aheads] if look_aheads else [])]
        refuse_unlike_sources(checkpoints, [head.name for head in joining])
        length = agreed_length([checkpoint for role, checkpoint in checkpoints.items() if role != FOREIGN], max_length)
        ours = vocabularies[TARGET]
        notes = [note for checkpoint in checkpoints.values() for note in checkpoint.notes]
        notes += [ours.note] if ours.note else []
        notes += [note for role in roles[1:] if role != FOREIGN for note in refuse_unequal(ours, vocabularies[role])]
        tokens = ours.entry()
        ours.save(folder / TOKENIZER)
        running = _sample(ours.tokenizer, tokens.vocab_size, text) if check or joining else None
        sample = running.first(min(LONGEST, length, max(2, LOGITS // tokens.vocab_size))) if check and running else None
        models: list[ModelReport] = []
        logits: dict[str, Tensor] = {}
        joined: dict[str, _Joined] = {}
        for role, checkpoint in checkpoints.items():
            shape = checkpoint.shape
            longest, reads = length, sample
            if role == FOREIGN:
                longest = min(shape.positions, SPREAD * length)
                own = vocabularies[role]
                reads = sample and _sample(own.tokenizer, own.entry().vocab_size, text).first(len(sample.tokens))
            elif shape.vocab_size < tokens.vocab_size:  # a draft that lacks the target's last tokens
                shape = replace(shape, vocab_size=tokens.vocab_size)
            contract = shape.contract(longest, dtype)
            stored = settled(weights if role == TARGET else draft_weights, checkpoint, dtype)
            report, logits_read, found = _export_model(
                role,
                checkpoint,
                folder,
                contract,
                stored,
                reads,
                progress,
                heads if role == TARGET else {},
                look_aheads if role == TARGET else None,
                running,
                notes,
            )
            joined |= found
            models.append(report)
            if report.entry.dequantised:
                notes.append(f"{checkpoint.name} is quantised by {report.entry.dequantised}")
            if logits_read is not None and role != FOREIGN:
                logits[role] = logits_read[:, : tokens.vocab_size]
        for role, one in joined.items():
            report, logits_read = _export_head(role, one, folder, draft_weights.unless_stored(), progress)
            models.append(report)
            notes += one.head.notes
            if logits_read is not None:
                logits[role] = logits_read[:, : tokens.vocab_size]
        encoders = export_encoders(
            checkpoints,
            {model.role: model.entry.contract for model in models},
            folder,
            {role: (weights if role == TARGET else draft_weights).unless_stored() for role in checkpoints},
            sample.tokens if sample else None,
            progress,
        )
        entries = {model.role: model.entry for model in models}
        if FOREIGN in entries:
            known = (sample.tokens, logits[TARGET]) if sample else None
            own = vocabularies[FOREIGN]
            said, entries[FOREIGN] = translate(folder / FOREIGN, ours, own, entries[FOREIGN], known, TEMPERATURES)
            notes.append(said)
        progress("hashing the files")
        reading = {encoder.role: encoder.entry for encoder in encoders}
        Bundle(folder, entries, tokens, installed(MADE_BY), files={}, encoders=reading).save()
    alpha = {
        role: {t: overlap(logits[TARGET][-len(said) :], said, t) for t in TEMPERATURES}
        for role, said in logits.items()
        if role != TARGET
    }
    seconds = time.perf_counter() - begun
    return ExportReport(Path(out), length, models, list(dict.fromkeys(notes)), alpha, seconds, encoders)


def settled(weights: Quantisation, checkpoint: Checkpoint, dtype: str) -> Quantisation:
    """Settle what `auto` means for a checkpoint: what a GGUF file holds is kept, others stay as they are."""
    if weights.kind != AUTO:
        return weights
    found = BLOCKS_OF.get(checkpoint.stored_as) if dtype == "float32" and checkpoint.lora is None else None
    return weights.unless_stored() if found is None else replace(weights, kind=found, as_stored=True)


def _roles(checkpoints: Sequence[Checkpoint], vocabularies: Sequence[Vocabulary]) -> list[str]:
    """Name the target and its drafts, of which one may have tokens of its own."""
    foreign = [
        number > 0
        and difference(vocabularies[0], vocabulary) is not None
        and reads_alone(checkpoints[0], checkpoints[number])
        for number, vocabulary in enumerate(vocabularies)
    ]
    if sum(foreign) > 1:
        names = " and ".join(one.name for one, own in zip(vocabularies, foreign, strict=True) if own)
        raise PairError(f"{names} both have other tokens than the target {vocabularies[0].name}; name one of them")
    named = iter((TARGET, *DRAFTS))
    return [FOREIGN if own else next(named) for own in foreign]


def _told_apart(
    target: str | Path, drafts: Sequence[str | Path]
) -> tuple[list[str | Path], dict[str, HeadCheckpoint], LookAheads | None]:
    """Tell models of their own from heads, of which a bundle holds one of each kind, and these from look-aheads."""
    if drafts:
        find_config(str(target))  # which is refused before any weights of a draft are brought
    models, heads, look_aheads = list[str | Path](), dict[str, HeadCheckpoint](), list[LookAheads]()
    for draft in drafts:
        if (found := open_look_aheads(draft)) is not None:
            look_aheads.append(found)
            continue
        head = open_head(draft, target)
        if head is None:
            models.append(draft)
        elif head.kind.name in heads:
            raise ExportError(f"{head.name} and {heads[head.kind.name].name} are both {head.kind.name} heads; name one")
        else:
            heads[head.kind.name] = head
    if len(look_aheads) > 1:
        raise ExportError(f"{look_aheads[1].name} and {look_aheads[0].name} are both look-aheads; name one")
    return models, heads, next(iter(look_aheads), None)


def _sample(tokenizer: Any, vocab_size: int, text: str | None) -> Sample:
    ids: list[int] = tokenizer.encode(SAMPLE.read_text(encoding="utf-8") if text is None else text).ids
    if len(ids) < 2:
        raise ExportError(f"the text has {len(ids)} tokens, expected at least 2 to measure the models on")
    return Sample(ids, vocab_size)


def _export_model(
    role: str,
    checkpoint: Checkpoint,
    folder: Path,
    contract: Contract,
    weights: Quantisation,
    sample: Sample | None,
    progress: Progress,
    heads: Mapping[str, HeadCheckpoint],
    look_aheads: LookAheads | None,
    running: Sample | None,
    notes: list[str],
) -> "tuple[ModelReport, Tensor | None, dict[str, _Joined]]":
    """Export one model; returns the logits of the sample, too, and the heads that are joined to it.

    Without a sample nothing is checked.
    """
    begun = time.perf_counter()
    shape = checkpoint.shape
    progress(f"{role}: loading the weights of {checkpoint.name}")
    model = load_model(checkpoint, contract.dtype, contract.vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    loaded: dict[str, LoadedHead] = {}
    bigram = bigram_overlap(model, running.first(MEASURED)) if heads and running is not None else None
    for name, head in heads.items():
        assert running is not None
        progress(f"{name}: joining {head.name} to its target")
        loaded[name] = head.kind.load(head, model, contract, running.first(MEASURED)).beside(head.name, bigram)
    features = {name: head.features for name, head in loaded.items()}
    contract = with_features(contract, loaded)
    more = 0
    if look_aheads is not None:
        assert running is not None
        progress(f"{role}: joining the look-aheads of {look_aheads.name}")
        more = look_aheads.join(model, contract.vocab_size)
        notes.append(look_aheads.measured(model, contract, running, more))
    reference: Reference | None = None
    sources = []
    if sample is not None:
        progress(f"{role}: computing reference logits in torch")
        if shape.source is not None:
            sources = [model.hears(source) for source in example_sources(shape.source, sample.tokens)]
        with behind_first(model, sources):
            before = checkpoint_logits(model, sample.tokens)
        if weights.kind == "none":  # now, while the graph takes no memory yet
            reference = make_reference(model, contract, shape.window, sample, before, features, sources, more)
    progress(f"{role}: tracing")
    kept = kept_matrices(checkpoint)
    graph, fired = build_graph(model, contract, shape.positions, weights, kept or nothing_known, features)
    if sample is not None and reference is None:
        progress(f"{role}: computing reference logits of the rounded weights")
        reference = make_reference(model, contract, shape.window, sample, before, features, sources, more)
    joined = {}
    for name, one in loaded.items():
        seen = None if sample is None else branch_features(model, [sample.tokens], {name: one.features})[0]
        joined[name] = _Joined(one, heads[name], sample.tokens if sample else [], seen)
    progress(f"{role}: writing")
    write_graph(graph, folder / role)
    nodes = len(graph.graph)
    del model, graph  # the check holds the written weights: the checkpoint's must be gone
    gc.collect()
    check: dict[str, Any] = {}
    logits = None
    if reference is not None:
        progress(f"{role}: checking in ONNX Runtime")
        check, logits = check_graph(folder / role / GRAPH, contract, reference, weights.kind)
    if contract.dtype == "float32" and weights.kind not in UNFUSED:
        own = write_fused(folder / role)
        if any(own.values()) and reference is not None:
            try:
                fused, logits = check_graph(folder / role / FUSED, contract, reference, weights.kind)
                check = worse(check, fused)
            except (EngineError, ExportError) as error:  # model.onnx is sound: it has passed before this was there
                (folder / role / FUSED).unlink()
                own = {}
                notes.append(f"{role}/{FUSED} was left out, and ONNX Runtime will run the slower {GRAPH}: {error}")
        fired |= own
    kind = role if role in (TARGET, FOREIGN) else DRAFT
    was = checkpoint.stored_as
    if was and weights.as_stored:
        was += f": {fired['quantise']} matrices kept bit for bit"
    elif was:
        was += f": {kept or 'dequantised'}"
    masks = _masks(checkpoint, contract) if kind == DRAFT else None
    entry = ModelEntry(
        kind,
        checkpoint.label,
        checkpoint.architecture,
        parameters,
        contract,
        weights.kind,
        check,
        was,
        masks,
        look_aheads=more,
    )
    size = (folder / role / WEIGHTS).stat().st_size
    seconds = time.perf_counter() - begun
    return ModelReport(role, entry, nodes, fired, size, seconds, checkpoint.weight_bytes), logits, joined


def _masks(checkpoint: Checkpoint, contract: Contract) -> Masks | None:
    """Say what a draft reads in place of tokens that are not known yet, if it was trained to (PARD)."""
    token = getattr(checkpoint.config, "pard_token", None)
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < contract.vocab_size:
        raise ExportError(
            f"config.json of checkpoint {checkpoint.name} has the pard_token {token!r}, expected one of its "
            f"{contract.vocab_size:,} tokens; download it again"
        )
    return Masks(token)


@dataclass(frozen=True)
class _Joined:
    """A head that is joined to its target, and what it reads of a sample."""

    head: LoadedHead
    checkpoint: HeadCheckpoint
    tokens: list[int]
    features: Tensor | None  # [L, hidden]; None: nothing is checked


def _export_head(
    name: str, joined: _Joined, folder: Path, weights: Quantisation, progress: Progress
) -> tuple[ModelReport, Tensor | None]:
    """Export one head; returns the logits of the sample's slots, too."""
    begun = time.perf_counter()
    head, contract = joined.head.module, joined.head.contract
    parameters = sum(parameter.numel() for parameter in head.parameters())
    progress(f"{name}: tracing")
    graph, fired = build_graph(head, contract, contract.max_length, weights)
    progress(f"{name}: writing")
    write_graph(graph, folder / name)
    if tables := head.tables():
        write_tables(folder / name, {key: table.detach().numpy() for key, table in tables.items()})
    nodes = len(graph.graph)
    check: dict[str, Any] = {}
    logits = None
    if joined.features is not None:
        progress(f"{name}: checking in ONNX Runtime")
        tokens, quantised = torch.tensor(joined.tokens), weights.kind != "none"
        check, logits = check_head(folder / name / GRAPH, contract, head, tokens, joined.features, quantised)
        check |= {"overlap": joined.head.readings}
    entry = ModelEntry(HEAD, joined.checkpoint.label, name, parameters, contract, weights.kind, check, masks=head.masks)
    size = (folder / name / WEIGHTS).stat().st_size
    return ModelReport(name, entry, nodes, fired, size, time.perf_counter() - begun), logits


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Give the versions of those packages that are installed; of the two onnxruntimes at most one is."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


@contextmanager
def _disk_errors(out: str | Path) -> Iterator[None]:
    """Say in a sentence that a disk is full or read-only."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write bundle {out}: {error.strerror or error}; nothing was left there") from error
