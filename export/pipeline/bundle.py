"""Make a checked bundle of a target's checkpoint and those of its drafts, or say in one sentence why not."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...engines import Bundle, ExportError
from ...engines.bundle import DRAFTS, FOREIGN, TARGET, TOKENIZER, WEIGHTS
from ...engines.errors import counted
from ..checkpoints.agreement import agree
from ..checkpoints.narrow_caches import FULL
from ..foreign import translate
from ..kinds import sorted_out
from ..passes.quantise import Quantisation
from ..writing.aside import built_aside, disk_errors, refuse_inside
from ..writing.encoders import export_encoders
from ..writing.graph import WIDE
from ..writing.images import image_settings, write_image_settings
from ..writing.quiet import quiet_libraries
from ..writing.report import EncoderReport, ExportReport, VisionReport
from ..writing.vision import config_of_whole, export_vision
from .export import TEMPERATURES, Export, Progress
from .head import export_head
from .model import export_model
from .settings import Settings
from .splitting import Splitting

MADE_BY = ("trt-spec", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")


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
    settings = Settings(dtype, weights, draft_weights, cache, check, images, adapters, adapter_rank, shards, exact_sums)
    named = [] if draft is None else [draft] if isinstance(draft, str | Path) else draft
    refuse_inside(Path(out), [target, *named, lora, *draft_lora])
    drafts, joining = sorted_out(target, named)
    if len(drafts) > len(DRAFTS):
        raise ExportError(f"there are {len(drafts)} drafts, expected at most {len(DRAFTS)}; leave the others out")
    if len(draft_lora) > len(drafts):
        raise ExportError(
            f"{counted(len(draft_lora), 'adapter')} for {counted(len(drafts), 'draft')}, expected one for each at most"
        )
    begun = time.perf_counter()
    with quiet_libraries(), disk_errors(out), built_aside(Path(out)) as folder:
        fetching = "" if Path(target).exists() else f", and fetching {target} unless it is here"
        progress(f"reading configurations and tokenizers{fetching}")
        merged = [lora, *draft_lora, *[None] * (len(drafts) - len(draft_lora))]
        agreed = agree([target, *drafts], merged, joining.names, max_length)
        export = Export(folder, settings, agreed, joining, progress, text, agreed.notes)
        _write_tokenizer(export)
        for role in agreed.checkpoints:
            export_model(export, role)
        for name in export.heads:
            export_head(export, name)
        encoders, vision = _encoders(export), _vision(export)
        splitting = Splitting(folder, shards, exact_sums, progress)
        if settings.splits:
            _split(export, splitting)
        bundle = _bundle(export, encoders, vision)
        bundle.save()
        export.notes += splitting.check(bundle.target.contract)
    seconds, notes = time.perf_counter() - begun, list(dict.fromkeys(export.notes))
    return ExportReport(Path(out), agreed.length, export.models, notes, export.overlaps(), seconds, encoders, vision)


def _write_tokenizer(export: Export) -> None:
    """Write the target's tokenizer, and how it reads images."""
    ours, checkpoint = export.agreed.vocabularies[TARGET], export.agreed.checkpoints[TARGET]
    ours.save(export.folder / TOKENIZER)
    if export.settings.images:
        config_of_whole(checkpoint)
        write_image_settings(image_settings(checkpoint, ours.tokenizer), export.folder)


def _encoders(export: Export) -> list[EncoderReport]:
    checkpoints, settings = export.agreed.checkpoints, export.settings
    weights = {role: settings.stored(role).unless_stored() for role in checkpoints}
    contracts = {model.role: model.entry.contract for model in export.models}
    return export_encoders(checkpoints, contracts, export.folder, weights, export.text, export.progress)


def _vision(export: Export) -> VisionReport | None:
    settings, checkpoint = export.settings, export.agreed.checkpoints[TARGET]
    if not settings.images:
        return None
    [contract] = (model.entry.contract for model in export.models if model.role == TARGET)
    towers, kept = settings.stored(TARGET).unless_stored(), settings.settled(TARGET, checkpoint)
    return export_vision(checkpoint, contract, export.folder, towers, kept, settings.check, export.progress)


def _split(export: Export, splitting: Splitting) -> None:
    """Split the target, once all that reads its whole graph is done."""
    [place] = (place for place, model in enumerate(export.models) if model.role == TARGET)
    model = export.models[place]
    contract, found = splitting.split(model.entry.contract, export.text)
    export.notes += found
    size = (export.folder / TARGET / WEIGHTS).stat().st_size
    export.models[place] = replace(model, entry=replace(model.entry, contract=contract), weight_bytes=size)


def _bundle(export: Export, encoders: list[EncoderReport], vision: VisionReport | None) -> Bundle:
    """Return the bundle of all that was written, its files still to be hashed."""
    entries, vocabularies = {model.role: model.entry for model in export.models}, export.agreed.vocabularies
    ours = vocabularies[TARGET]
    if FOREIGN in entries:
        known = None if export.text is None else (export.text, export.logits[TARGET][:, : export.vocab_size])
        folder, own = export.folder / FOREIGN, vocabularies[FOREIGN]
        said, entries[FOREIGN] = translate(folder, ours, own, entries[FOREIGN], known, TEMPERATURES)
        export.notes.append(said)
    export.progress("hashing the files")
    return Bundle(
        export.folder,
        entries,
        ours.entry(),
        _installed(MADE_BY),
        files={},
        encoders={encoder.role: encoder.entry for encoder in encoders},
        vision=None if vision is None else vision.entry,
    )


def _installed(packages: Sequence[str]) -> dict[str, str]:
    """Give the versions of those packages that are installed; of the two onnxruntimes at most one is."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
