"""Make a checked bundle of a target's checkpoint and those of its drafts, or say in one sentence why not."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engines import FP8, Adapters, Bundle, Contract, ExportError, ModelEntry
from ..engines.bundle import DRAFT, DRAFTS, FOREIGN, FUSED, GRAPH, HEAD, TARGET, TOKENIZER, WEIGHTS, write_tables
from .checking.check import check_model, given_sources
from .checking.check_adapters import AdapterReference, check_adapters
from .checking.check_shards import check_shards, whole_logits
from .checking.key_factors import key_factors
from .checking.oracle import Reference
from .checking.quality import LOGITS, LONGEST, Sample, overlap
from .checkpoints.agreement import agree
from .checkpoints.checkpoint import Checkpoint, kept_matrices, load_model
from .checkpoints.narrow_caches import CACHES, FULL, with_cache
from .foreign import translate
from .kinds import Joining, LoadedHead, check_head, sorted_out
from .parallel.split import split
from .passes.adapt import adaptable, linear_modules
from .passes.divide_keys import NO_FACTORS
from .passes.quantise import AUTO, Quantisation, nothing_known
from .sources.examples import example_sources
from .writing.aside import built_aside, disk_errors
from .writing.encoders import export_encoders
from .writing.graph import WIDE, build_graph, write_adapted, write_fused, write_graph
from .writing.images import image_settings, write_image_settings
from .writing.quiet import quiet_libraries
from .writing.report import ExportReport, ModelReport
from .writing.seeing_drafts import SeeingTarget, embedding_size
from .writing.vision import config_of_whole, contract_with_images, export_vision

MADE_BY = ("trt-spec", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")
SAMPLE = Path(__file__).with_name("sample.txt")
TEMPERATURES = (0.0, 1.0)
DTYPES = ("float32", "float16", "bfloat16")
UNFUSED = ("int8", "nvfp4")  # the one needs heads stacked, for the other ONNX Runtime has no kernels
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
    adapters: int = 0,
    adapter_rank: int = 16,
    cache: str = FULL,
    images: bool = False,
    shards: int = 1,
    exact_sums: bool = False,
) -> ExportReport:
    """Write the bundle `out`, whole or not at all; an existing bundle there is replaced at the very end.

    Several drafts become models of their own, draft, draft2 and so on, all with `draft_weights`, and so do heads, which
    have the names of their kinds. LoRA adapters are merged into target and drafts, in their order. Besides, requests
    may bring so many `adapters` of this rank for the target, or a lower one. Target and
    drafts keep keys and values as `cache` says; heads keep theirs in full. With `images` the target sees as well. Its
    graph is split into so many `shards`, which as many devices run together; their sums are made in float64 if they
    are to be `exact_sums`.
    """
    if dtype not in DTYPES:
        raise ExportError(f"dtype is {dtype!r}, expected {', '.join(DTYPES)}")
    if cache not in CACHES:
        raise ExportError(f"cache is {cache!r}, expected {', '.join(CACHES)}")
    if check and find_spec("onnxruntime") is None:
        raise ExportError(
            "the check needs ONNX Runtime, which is not installed; pip install 'trt-spec[cpu]' or export unchecked"
        )
    if shards > 1 or exact_sums:
        _refuse_split(adapters, cache, images)
    drafts, joining = sorted_out(target, [] if draft is None else [draft] if isinstance(draft, str | Path) else draft)
    if len(drafts) > len(DRAFTS):
        raise ExportError(f"there are {len(drafts)} drafts, expected at most {len(DRAFTS)}; leave the others out")
    if len(draft_lora) > len(drafts):
        raise ExportError(f"there are {len(draft_lora)} adapters for {len(drafts)} drafts; name one for each at most")
    begun = time.perf_counter()
    with quiet_libraries(), disk_errors(out), built_aside(Path(out)) as folder:
        fetching = "" if Path(target).exists() else f", and fetching {target} unless it is here"
        progress(f"reading configurations and tokenizers{fetching}")
        merged = [lora, *draft_lora, *[None] * (len(drafts) - len(draft_lora))]
        agreed = agree([target, *drafts], merged, joining.names, max_length)
        ours = agreed.vocabularies[TARGET]
        tokens = ours.entry()
        ours.save(folder / TOKENIZER)
        if images:
            config_of_whole(agreed.checkpoints[TARGET])
            write_image_settings(image_settings(agreed.checkpoints[TARGET], ours.tokenizer), folder)
        stored = {role: weights if role == TARGET else draft_weights for role in agreed.checkpoints}
        needed = check or bool(joining.names) or cache != FULL
        running = _sample(ours.tokenizer, tokens.vocab_size, text) if needed else None
        most = min(LONGEST, agreed.length, max(2, LOGITS // tokens.vocab_size))
        export = _Export(folder, progress, joining, running, agreed.notes, adapters, adapter_rank)
        export.shards, export.exact_sums = shards, exact_sums
        for role, checkpoint in agreed.checkpoints.items():
            read = running
            if role == FOREIGN and running:
                own = agreed.vocabularies[role]
                read = _sample(own.tokenizer, own.entry().vocab_size, text)
            sample = read.first(min(most, len(running.tokens))) if check and read and running else None
            kept = settled(stored[role], checkpoint, dtype)
            contract = with_cache(checkpoint.name, agreed.contract(role, dtype), cache)
            if images and role == TARGET:
                contract = contract_with_images(checkpoint, contract)
            export.model(role, checkpoint, contract, kept, sample, read)
        for name, head in export.heads.items():
            export.head(name, head, draft_weights.unless_stored())
        entries = {model.role: model.entry for model in export.models}
        encoders = export_encoders(
            agreed.checkpoints,
            {role: entry.contract for role, entry in entries.items()},
            folder,
            {role: kind.unless_stored() for role, kind in stored.items()},
            export.text,
            progress,
        )
        sees = None
        if images:
            checkpoint, kept = agreed.checkpoints[TARGET], settled(weights, agreed.checkpoints[TARGET], dtype)
            contract, towers = entries[TARGET].contract, stored[TARGET].unless_stored()
            sees = export_vision(checkpoint, contract, folder, towers, kept, check, progress)
        if FOREIGN in entries:
            known = None if export.text is None else (export.text, export.logits[TARGET][:, : tokens.vocab_size])
            own = agreed.vocabularies[FOREIGN]
            said, entries[FOREIGN] = translate(folder / FOREIGN, ours, own, entries[FOREIGN], known, TEMPERATURES)
            export.notes.append(said)
        progress("hashing the files")
        reading = {encoder.role: encoder.entry for encoder in encoders}
        vision = None if sees is None else sees.entry
        if reading and shards > 1:
            raise ExportError("a target that reads sources cannot be split into shards yet; export it whole")
        bundle = Bundle(folder, entries, tokens, installed(MADE_BY), files={}, encoders=reading, vision=vision)
        bundle.save()
        if export.whole is not None and shards > 1:
            progress(f"{TARGET}: checking the shards in processes of their own")
            found = check_shards(folder / TARGET / GRAPH, entries[TARGET].contract, *export.whole)
            export.notes.append(f"the {shards} shards together: the worst logit is off by {found:.1e} deviations")
    seconds = time.perf_counter() - begun
    notes, alpha = list(dict.fromkeys(export.notes)), export.overlaps(tokens.vocab_size)
    return ExportReport(Path(out), agreed.length, export.models, notes, alpha, seconds, encoders, sees)


def _refuse_split(adapters: int, cache: str, images: bool) -> None:
    """Refuse what has no shards yet."""
    if images:
        raise ExportError("a target in shards cannot see yet; leave one of them out")
    if adapters:
        raise ExportError("a target in shards has no room for adapters yet; leave one of them out")
    if cache != FULL:
        raise ExportError(f"a target in shards cannot keep its cache in {cache} yet; leave one of them out")


def settled(weights: Quantisation, checkpoint: Checkpoint, dtype: str) -> Quantisation:
    """Settle what `auto` means for a checkpoint: what a GGUF file holds is kept, others stay as they are."""
    if weights.kind != AUTO:
        return weights
    found = BLOCKS_OF.get(checkpoint.stored_as) if dtype == "float32" and checkpoint.lora is None else None
    return weights.unless_stored() if found is None else replace(weights, kind=found, as_stored=True)


def _fuses(contract: Contract, weights: Quantisation) -> bool:
    """Whether ONNX Runtime is to have a graph of its own operators; over a cache of int8 that has its heads stacked."""
    if contract.dtype != "float32" or contract.rounded_to == FP8:
        return False
    return weights.kind not in UNFUSED or (weights.kind == "int8" and bool(contract.rounded_to))


def _sample(tokenizer: Any, vocab_size: int, text: str | None) -> Sample:
    ids: list[int] = tokenizer.encode(SAMPLE.read_text(encoding="utf-8") if text is None else text).ids
    if len(ids) < 2:
        raise ExportError(f"the text has {len(ids)} tokens, expected at least 2 to measure the models on")
    return Sample(ids, vocab_size)


@dataclass
class _Export:
    """A bundle that is being written, and what was found of its models."""

    folder: Path
    progress: Progress
    joining: Joining
    running: Sample | None  # the text on which heads are measured
    notes: list[str]
    adapters: int = 0  # that the target has room for,
    adapter_rank: int = 1  # each of so many columns
    shards: int = 1  # of the target
    exact_sums: bool = False  # between them
    seeing: SeeingTarget | None = None
    whole: tuple[list[int], Tensor] | None = None  # the text, and what the target says of it before it is split
    models: list[ModelReport] = field(default_factory=list)
    heads: dict[str, LoadedHead] = field(default_factory=dict)  # that are joined to the target, by kind
    logits: dict[str, Tensor] = field(default_factory=dict)  # of the sample, by model
    text: list[int] | None = None  # the target's sample, if it is checked
    read: Mapping[str, Tensor] = field(default_factory=dict)  # what each head reads of it [L, hidden]

    def model(
        self,
        role: str,
        checkpoint: Checkpoint,
        contract: Contract,
        weights: Quantisation,
        sample: Sample | None,
        text: Sample | None,
    ) -> None:
        """Export a model; a target has heads and look-aheads joined to it.

        Without a sample nothing is checked. Of the text it is measured what the channels of keys are like.
        """
        begun, kind = time.perf_counter(), role if role in (TARGET, FOREIGN) else DRAFT
        self.progress(f"{role}: loading the weights of {checkpoint.name}")
        masks = checkpoint.masks(contract.vocab_size) if kind == DRAFT else None
        kept = kept_matrices(checkpoint)
        model = load_model(checkpoint, contract.dtype, contract.vocab_size)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if contract.image_size:
            self.seeing = SeeingTarget(checkpoint, contract, embedding_size(model))
        elif self.seeing is not None and kind == DRAFT:
            contract = self.seeing.draft(checkpoint, contract, embedding_size(model))
        joining = self.joining if kind == TARGET else Joining()
        joined = joining.join_to(model, contract, self.running, self.progress)
        self.heads |= joined.heads
        self.notes += joined.notes
        contract, features, shape, reference = joined.contract, joined.features, checkpoint.shape, None
        if joined.look_aheads and contract.image_size:
            raise ExportError("look-aheads and images take the same ids after the vocabulary; leave one of them out")
        factors = key_factors(model, contract, text.tokens) if text is not None and contract.rounded_to else NO_FACTORS
        if sample is not None:
            self.progress(f"{role}: computing reference logits in torch")
            sources = [model.hears(one) for one in example_sources(shape.source, sample.tokens)]
            more = joined.look_aheads
            reference = Reference(model, contract, sample, shape.window, features, sources, more, factors)
            if weights.kind == "none":  # now, while the graph takes no memory yet
                reference.answer(model)
        self.progress(f"{role}: tracing")
        graph, fired = build_graph(model, contract, shape.positions, weights, kept or nothing_known, features, factors)
        if reference is not None and weights.kind != "none":
            self.progress(f"{role}: computing reference logits of the rounded weights")
            reference.answer(model)
        adapted = None
        if role == TARGET and self.adapters:
            products = adaptable(graph, linear_modules(model))
            room = Adapters(self.adapters, self.adapter_rank, products)
            contract = replace(contract, adapters=room)
            if reference is not None:
                self.progress(f"{role}: computing reference logits with adapters")
                adapted = AdapterReference(model, room, reference.sample.tokens, reference.heard)
        self.progress(f"{role}: writing")
        write_graph(graph, self.folder / role)
        nodes = len(graph.graph)
        del model, graph  # the check holds the written weights: the checkpoint's must be gone
        gc.collect()
        fuse: Callable[[Path], dict[str, int]] = write_fused if _fuses(contract, weights) else lambda folder: {}
        check: dict[str, Any] = {}
        if reference is None:
            fused = fuse(self.folder / role)
        else:
            self.progress(f"{role}: checking in ONNX Runtime")
            check, self.logits[role], fused, failure = check_model(
                self.folder / role, contract, reference, weights.kind, fuse
            )
            if role == TARGET:
                self.text, self.read = reference.sample.tokens, reference.read
            if failure is not None:
                why = f"was left out, and ONNX Runtime will run the slower {GRAPH}: {failure}"
                self.notes.append(f"{role}/{FUSED} {why}")
        fired |= fused
        if contract.adapters is not None:
            fired["adapt"] = write_adapted(self.folder / role, contract.adapters)
        if adapted is not None and reference is not None:
            for name in (GRAPH, FUSED):
                if (graph_file := self.folder / role / name).exists():
                    first = given_sources(contract, reference.sources[:1])
                    check["adapters"] = check_adapters(graph_file, contract, adapted, reference.scale, first)
        if role == TARGET and (self.shards > 1 or self.exact_sums):
            contract = self._split(contract, None if reference is None else reference.sample.tokens)
        was = checkpoint.stored_as
        if was:
            how = f"{fired['quantise']} matrices kept bit for bit" if weights.as_stored else kept or "dequantised"
            was += f": {how}"
            self.notes.append(f"{checkpoint.name} is quantised by {was}")
        label, architecture, more = checkpoint.label, checkpoint.architecture, joined.look_aheads
        entry = ModelEntry(
            kind, label, architecture, parameters, contract, weights.kind, check, was, masks, look_aheads=more
        )
        self._report(role, entry, nodes, fired, begun, checkpoint.weight_bytes)

    def _split(self, contract: Contract, text: list[int] | None) -> Contract:
        """Split the target's graph into shards; return the contract of each."""
        folder = self.folder / TARGET
        if text is not None:
            self.whole = text, whole_logits(folder / GRAPH, contract, text)
        self.progress(f"{TARGET}: splitting it into {self.shards} shards")
        contract, found = split(folder, contract, self.shards, exact=self.exact_sums)
        if self.shards == 1:
            self.notes.append(f"{found.sums} sums of each call are made in float64")
            return contract
        self.notes.append(
            f"each of {self.shards} shards holds {found.share:.1%} of the target's weights, and a call sums "
            f"{found.sums} times"
        )
        self.notes += [f"every shard holds {name} whole: {why}" for name, why in found.whole_for.items()]
        return contract

    def head(self, name: str, loaded: LoadedHead, weights: Quantisation) -> None:
        """Export a head that is joined to the target."""
        begun, head, contract = time.perf_counter(), loaded.module, loaded.contract
        parameters = sum(parameter.numel() for parameter in head.parameters())
        self.progress(f"{name}: tracing")
        graph, fired = build_graph(head, contract, contract.max_length, weights)
        self.progress(f"{name}: writing")
        write_graph(graph, self.folder / name)
        if tables := head.tables():
            write_tables(self.folder / name, {key: table.detach().numpy() for key, table in tables.items()})
        check: dict[str, Any] = {}
        if self.text is not None:
            self.progress(f"{name}: checking in ONNX Runtime")
            tokens, quantised = torch.tensor(self.text), weights.kind != "none"
            check, logits = check_head(self.folder / name / GRAPH, contract, head, tokens, self.read[name], quantised)
            check |= {"overlap": loaded.readings}
            self.logits[name] = logits
        self.notes += loaded.notes
        entry = ModelEntry(HEAD, loaded.label, name, parameters, contract, weights.kind, check, masks=head.masks)
        self._report(name, entry, len(graph.graph), fired, begun)

    def _report(
        self, role: str, entry: ModelEntry, nodes: int, fired: dict[str, int], begun: float, checkpoint_bytes: int = 0
    ) -> None:
        size, seconds = (self.folder / role / WEIGHTS).stat().st_size, time.perf_counter() - begun
        self.models.append(ModelReport(role, entry, nodes, fired, size, seconds, checkpoint_bytes))

    def overlaps(self, vocab_size: int) -> dict[str, dict[float, float]]:
        """Return the overlap of target and drafts on the sample, by draft and temperature."""
        drafts = {role: said[:, :vocab_size] for role, said in self.logits.items() if role not in (TARGET, FOREIGN)}
        target = self.logits[TARGET][:, :vocab_size] if drafts else torch.zeros(0)
        return {
            role: {t: overlap(target[-len(said) :], said, t) for t in TEMPERATURES} for role, said in drafts.items()
        }


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Give the versions of those packages that are installed; of the two onnxruntimes at most one is."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
