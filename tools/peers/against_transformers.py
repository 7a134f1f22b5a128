"""Run the bundle's checkpoints in transformers: its generate, assisted generation and prompt lookup.

Where the draft has other tokens it assists universally: by its text, or where texts are sampled by common tokens.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...engines import Bundle, ModelEntry, PairError
from ...export.checkpoints.checkpoint import open_checkpoint, reading
from ...export.checkpoints.finding import GGUF
from ...export.writing.quiet import quiet_libraries
from ...runtime import SamplingParams
from ...runtime.drafters import usual_drafter
from ..flags.compared import DRAFTED, OWN_TOKENS, compared_folders
from ..timing.bandwidth import all_cores
from ..timing.theirs import Theirs
from ..timing.time_rounds import Setting

PLAIN = Setting(0, "none")
WITH_DRAFT = (*DRAFTED, *OWN_TOKENS)


class Arrivals:
    """The streamer of a generate call: how many tokens came when, in milliseconds from the call."""

    def __init__(self) -> None:
        self.tokens: list[tuple[float, int]] = []
        self._began = perf_counter()
        self._prompt_came = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_came:
            self.tokens.append((1e3 * (perf_counter() - self._began), tokens.numel()))
        self._prompt_came = True

    def end(self) -> None:
        pass


class Transformers:
    """A target, and a draft if there is one, on all cores, with the attention that transformers itself chooses."""

    def __init__(
        self, target: Path, draft: Path | None, dtype: str = "float32", device: str = "cpu", own_tokens: bool = False
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        self._models: dict[str, Any] = {}
        for role, path in (("target", target), ("draft", draft)):
            if path is not None:
                place, stored = (path.parent, {"gguf_file": path.name}) if path.suffix == GGUF else (path, {})
                with quiet_libraries(), reading(stored.get("gguf_file")):
                    model = AutoModelForCausalLM.from_pretrained(
                        place, dtype=getattr(torch, dtype), use_safetensors=True, local_files_only=True, **stored
                    )
                # A checkpoint may bring settings of its own; none of them may stop a text or change it.
                model.generation_config = GenerationConfig()
                self._models[role] = model.to(device).eval()
        self._tokenizers: dict[str, Any] = {}
        if draft is not None and own_tokens:
            names = {"tokenizer": target, "assistant_tokenizer": draft}
            self._tokenizers = {key: AutoTokenizer.from_pretrained(path) for key, path in names.items()}
        if draft is not None:  # or K would change from round to round
            self._models["draft"].generation_config.num_assistant_tokens_schedule = "constant"
            self._models["draft"].generation_config.assistant_confidence_threshold = 0.0

    def runs_as(self) -> dict[str, Any]:
        target = self._models["target"]
        return {"dtype": str(target.dtype).removeprefix("torch."), "attention": target.config._attn_implementation}

    def parameters(self, role: str) -> int:
        return sum(parameter.numel() for parameter in self._models[role].parameters())

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, setting: Setting = PLAIN, arrivals: Arrivals | None = None
    ) -> list[int]:
        """Decode as many tokens as asked for, whatever they are."""
        options: dict[str, Any] = {"max_new_tokens": params.max_new_tokens, "do_sample": not params.greedy}
        if not params.greedy:
            options |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
            options |= {"min_p": params.min_p or None}
        if setting.drafter in WITH_DRAFT:
            options |= {"assistant_model": self._models["draft"]} | self._tokenizers
            self._models["draft"].generation_config.num_assistant_tokens = setting.draft_length
        elif setting.drafter == "lookup":
            options["prompt_lookup_num_tokens"] = setting.draft_length
        target = self._models["target"]
        ids = torch.tensor([list(prompt)], device=target.device)
        torch.manual_seed(params.seed or 0)
        with all_cores(), quiet_libraries():
            whole = target.generate(ids, attention_mask=torch.ones_like(ids), streamer=arrivals, **options)
        found: list[int] = whole[0, len(prompt) :].tolist()
        return found

    def measure(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], into: Theirs) -> None:
        """Decode all prompts once."""
        tokens, ms = 0, 0.0
        into.texts = []
        for prompt, param in zip(prompts, params, strict=True):
            arrivals = Arrivals()
            into.texts.append(self.generate(prompt, param, into.setting, arrivals))
            before = 0.0
            for at_ms, count in arrivals.tokens:
                into.waits.add(count, at_ms - before, first=before == 0)
                before = at_ms
            tokens += sum(count for _, count in arrivals.tokens[1:])
            ms += arrivals.tokens[-1][0] - arrivals.tokens[0][0]
        into.tokens_per_second.append(1e3 * tokens / ms)


def compared_checkpoints(arguments: argparse.Namespace, bundle: Bundle, drafter: str) -> dict[str, Path]:
    """The named checkpoints by role, refused before any weight is read if the bundle was not made from them."""
    named = compared_folders(arguments, drafter)
    for role, path in named.items():
        checkpoint, entry = open_checkpoint(path), _entry(bundle, role, drafter in OWN_TOKENS)
        found = checkpoint.shape.contract(entry.contract.max_length, entry.contract.dtype)
        if (checkpoint.architecture, found) != (entry.architecture, entry.contract):
            raise _not_of_the_bundle(role, path, entry, f"a {checkpoint.architecture} of another shape")
        named[role] = checkpoint.path / checkpoint.gguf if checkpoint.gguf else checkpoint.path
    return named


def open_checkpoints(
    arguments: argparse.Namespace, bundle: Bundle, checkpoints: Mapping[str, Path], longest: int
) -> Transformers:
    dtype, own = bundle.target.contract.dtype, (arguments.drafter or usual_drafter(bundle)) in OWN_TOKENS
    opened = Transformers(checkpoints["target"], checkpoints.get("draft"), dtype, arguments.device, own)
    for role, path in checkpoints.items():
        entry = _entry(bundle, role, own)
        if (found := opened.parameters(role)) != entry.parameters:
            raise _not_of_the_bundle(role, path, entry, f"a model of {found:,} parameters")
    return opened


def _entry(bundle: Bundle, role: str, own_tokens: bool) -> ModelEntry:
    """Return the bundle's model of a role; a draft may be the one that has tokens of its own."""
    foreign = bundle.foreign if own_tokens and role != "target" else None
    return bundle.models[foreign or role]


def _not_of_the_bundle(role: str, path: Path, entry: ModelEntry, found: str) -> PairError:
    return PairError(
        f"--{role}-checkpoint {path} is {found}, the bundle's {role} {entry.name} is a {entry.architecture} of "
        f"{entry.parameters:,} parameters; name the checkpoint that it was exported from"
    )
