"""Find out whether a draft suits a target before anything is exported: do they fit, agree, and pay?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...engines import (
    GRANULE,
    Bundle,
    Engine,
    ExportError,
    PairError,
    blank_cache,
    blank_step,
    open_engines,
    refuse_weights,
)
from ...export.checking.oracle import checkpoint_logits
from ...export.checking.quality import LONGEST, engine_logits, overlap
from ...export.checkpoints.agreement import difference, reads_alone, refuse_unequal
from ...export.checkpoints.checkpoint import Checkpoint, load_model, open_checkpoint
from ...export.checkpoints.vocabulary import Vocabulary, read_vocabulary
from ...export.foreign import TEXT, WAYS, BothWays, CommonTokens, common_tokens, compare, in_words
from ...export.kinds import open_any
from ...export.pipeline import SAMPLE, Progress
from ...export.writing.quiet import quiet_libraries
from ...runtime.translation.translation import Translation
from ..theory.lines import best_draft_length, speed_up
from ..timing.clock import run_ms
from .sibling_acceptance import sibling_acceptance

TEMPERATURES = (0.0, 0.7, 1.0)
LONGEST_DRAFT = 8
RUNS = 15


@dataclass(frozen=True)
class Side:
    """One model: its logits [L, V] on the text, and a run of one token that can be timed."""

    name: str
    logits: Tensor
    one_token: Callable[[], object]
    draws: bool = True  # what it proposes, from the softmax of its logits; else it is certain of that


def examine_pair(
    target: str, draft: str | None, text: str | None, progress: Progress = lambda stage: None
) -> dict[str, Any]:
    """Examine two checkpoints, or target and draft of one bundle, the first draft if none is named."""
    text = SAMPLE.read_text(encoding="utf-8") if text is None else text
    with quiet_libraries():
        if (Path(target) / "manifest.json").exists():
            found, sides = _bundle_sides(target, draft, text)
        else:
            assert draft is not None, "which the command refuses"
            found, sides = _checkpoint_sides(target, draft, text, progress)
    progress("timing a token of each")
    ours, theirs = sides
    t_ms, d_ms = (median(times) for times in _interleaved([ours.one_token, theirs.one_token]))
    cost = d_ms / t_ms * found.get("own_tokens", 1.0)
    found |= {"target_ms": t_ms, "draft_ms": d_ms, "cost_ratio": cost, "temperatures": []}
    for temperature in TEMPERATURES:
        alpha = overlap(ours.logits, theirs.logits, temperature)
        k = best_draft_length(alpha, cost, LONGEST_DRAFT)
        siblings = sibling_acceptance(ours.logits, theirs.logits, temperature) if theirs.draws else []
        row = {"temperature": temperature, "alpha": alpha, "siblings": siblings}
        found["temperatures"].append(row | {"best_draft_length": k, "speed_up": speed_up(alpha, k, cost)})
    return found


def _checkpoint_sides(target: str, draft: str, text: str, progress: Progress) -> tuple[dict[str, Any], list[Side]]:
    if (found := open_any(draft, target)) is not None:
        raise PairError(
            f"draft {draft} is a head of the kind {found[0]}, which export-models measures on its target as it "
            "joins them; name a model of its own"
        )
    checkpoints = [open_checkpoint(name) for name in (target, draft)]
    vocabularies = [read_vocabulary(checkpoint) for checkpoint in checkpoints]
    if difference(*vocabularies) is not None and reads_alone(*checkpoints):
        return _checkpoints_of_own_tokens(checkpoints, vocabularies, text, progress)
    notes = refuse_unequal(*vocabularies)
    size = vocabularies[0].entry().vocab_size
    positions = [checkpoint.shape.positions for checkpoint in checkpoints]
    tokens = _read(vocabularies[0].tokenizer, text, min(positions))
    sides = [_side(checkpoint, tokens, size, progress) for checkpoint in checkpoints]
    return {"source": "checkpoints", "notes": notes, "positions": positions, "tokens": len(tokens)}, sides


def _side(checkpoint: Checkpoint, tokens: list[int], vocab_size: int, progress: Progress) -> Side:
    progress(f"letting {checkpoint.name} read the text")
    model = load_model(checkpoint, "float32", vocab_size)
    return Side(checkpoint.name, checkpoint_logits(model, tokens)[:, :vocab_size], _one_token(model, tokens[-1]))


def _one_token(model: Any, token: int) -> Callable[[], object]:
    last = torch.tensor([[token]])

    @torch.no_grad()
    def run() -> object:
        return model(last, use_cache=False)

    return run


def _checkpoints_of_own_tokens(
    checkpoints: Sequence[Checkpoint], vocabularies: Sequence[Vocabulary], text: str, progress: Progress
) -> tuple[dict[str, Any], list[Side]]:
    ours, own = vocabularies
    common, positions = common_tokens(ours, own), [checkpoint.shape.positions for checkpoint in checkpoints]
    tokens = _read(ours.tokenizer, text, min(positions))
    target = _side(checkpoints[0], tokens, ours.entry().vocab_size, progress)
    progress(f"letting {checkpoints[1].name} read the text, in both ways")
    model = load_model(checkpoints[1], "float32")

    def reads(ids: list[int]) -> Tensor:
        return checkpoint_logits(model, ids[-positions[1] :])[-1, : common.vocab_size]

    both = compare(tokens, target.logits, ours.tokenizer, own.tokenizer, common, reads)
    draft = own.name, _one_token(model, common.own[0])
    found, sides = _both_ways(both, common, target, *draft)
    return {"source": "checkpoints", "positions": positions, "tokens": len(tokens)} | found, sides


def _both_ways(
    both: BothWays | None, common: CommonTokens, target: Side, name: str, one_token: Callable[[], object]
) -> tuple[dict[str, Any], list[Side]]:
    """Say what the draft has in common with its target; take it for what it is in the better of both ways."""
    if both is None:
        raise ExportError(f"the text has no place at which {name} could be compared with its target; give a longer one")
    drafter = both.better(TEMPERATURES)
    acceptance = {way: both.by_temperature(way, TEMPERATURES) for way in WAYS}
    notes = [in_words(name, common, target.logits.shape[1], acceptance, drafter)]
    draft = Side(name, both.said(drafter), one_token, draws=drafter != TEXT)
    found: dict[str, Any] = {"notes": notes, "drafter": drafter, "ways": acceptance}
    found |= {"own_tokens": both.tokens} if drafter == TEXT else {}
    return found, [Side(target.name, both.target, target.one_token), draft]


def _bundle_sides(path: str, draft: str | None, text: str) -> tuple[dict[str, Any], list[Side]]:
    bundle = Bundle.open(path)
    if bundle.foreign is not None and draft in (*([] if bundle.drafts else [None]), bundle.foreign):
        return _bundle_of_own_tokens(bundle, text)
    if draft not in (None, *bundle.drafts):
        own = " or ".join(bundle.drafts) or "none"
        raise PairError(f"{path} is a bundle, which holds its own draft, {own}; leave out --draft {draft}")
    if not bundle.drafts:
        raise PairError(f"{path} holds no draft model; export it with --draft")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundle.tokenizer_file))
    tokens = _read(tokenizer, text, bundle.max_length)
    names = [bundle.names[0], draft or bundle.drafts[0]]
    entries = [bundle.models[name] for name in names]
    engines = _opened(bundle, names)
    sides = []
    for engine, entry in zip(engines, entries, strict=True):
        logits = engine_logits(engine, tokens)[:, : bundle.tokenizer.vocab_size]
        sides.append(
            Side(entry.name, logits, blank_step(engine, blank_cache(engine.contract, 1, GRANULE), 0, 1, 1, 1).run)
        )
    positions = [entry.contract.max_length for entry in entries]
    return {"source": "bundle", "notes": [], "positions": positions, "tokens": len(tokens)}, sides


def _opened(bundle: Bundle, names: list[str]) -> list[Engine]:
    for name in names:
        refuse_weights("onnxruntime", name, bundle.models[name].weights)
    return open_engines("onnxruntime", [(bundle.graph(name), bundle.models[name].contract) for name in names])


def _bundle_of_own_tokens(bundle: Bundle, text: str) -> tuple[dict[str, Any], list[Side]]:
    from tokenizers import Tokenizer

    assert bundle.foreign is not None
    known = Translation.read(bundle, Tokenizer.from_file(str(bundle.tokenizer_file)), "cpu")
    pairs = known.target_ids.tolist(), known.own_ids.tolist()
    common = CommonTokens(*pairs, dict(known.roles), known.opening, known.vocab_size)
    tokens = _read(known.target, text, bundle.max_length)
    entries = [bundle.models[name] for name in (bundle.names[0], bundle.foreign)]
    engines = _opened(bundle, [bundle.names[0], bundle.foreign])
    runs = [blank_step(one, blank_cache(one.contract, 1, GRANULE), 0, 1, 1, 1).run for one in engines]
    logits = engine_logits(engines[0], tokens)[:, : bundle.tokenizer.vocab_size]
    positions = [entry.contract.max_length for entry in entries]

    def reads(ids: list[int]) -> Tensor:
        return engine_logits(engines[1], ids[-positions[1] :])[-1, : common.vocab_size]

    both = compare(tokens, logits, known.target, known.own, common, reads)
    found, sides = _both_ways(both, common, Side(entries[0].name, logits, runs[0]), entries[1].name, runs[1])
    return {"source": "bundle", "positions": positions, "tokens": len(tokens)} | found, sides


def _read(tokenizer: Any, text: str, positions: int) -> list[int]:
    tokens: list[int] = tokenizer.encode(text).ids[: min(LONGEST, positions)]
    if len(tokens) < 2:
        raise ExportError(f"the text has {len(tokens)} tokens, expected at least 2 to compare the models on")
    return tokens


def _interleaved(runs: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Time the runs in turn, after a warm-up each; return the milliseconds of each."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(RUNS + 1):
        for run, mine in zip(runs, times, strict=True):
            ms = run_ms(run)
            if turn:
                mine.append(ms)
    return times


def report(found: dict[str, Any]) -> str:
    lines = [
        found["notes"][0]
        if "ways" in found
        else "one token map, one set of special ids" + "".join(f"; {note}" for note in found["notes"]),
        f"positions: {found['positions'][0]:,} of the target, {found['positions'][1]:,} of the draft",
        f"one token: target {found['target_ms']:.2f} ms, draft {found['draft_ms']:.2f} ms, cost ratio "
        f"c = {found['cost_ratio']:.3f} (in {'torch' if found['source'] == 'checkpoints' else 'ONNX Runtime'})",
        f"on a text of {found['tokens']} tokens, verifying taken to cost one token:",
    ]
    for row in found["temperatures"]:
        k = row["best_draft_length"]
        advice = f"predicted {row['speed_up']:.2f} × at K = {k}" if k else "no draft length pays"
        siblings = ", ".join(f"{share:.3f}" for share in row["siblings"])
        beside = f"; siblings would add {siblings}" if siblings else ""
        lines.append(f"  temperature {row['temperature']:g}: α = {row['alpha']:.3f}, {advice}{beside}")
    return "\n".join(lines)
