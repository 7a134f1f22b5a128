"""Run the bundle's models in OpenVINO GenAI, as its own exporter made them: plain, with a draft, or with lookup.

Its pipeline for servers is stepped from here, so that both sides are timed alike: tokens count when a step has
returned them. Both compute in the same type, unless it is asked to choose its own, which on many CPUs is bfloat16.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ...engines import Bundle, Contract, EngineError, PairError, RequestError, usable_cores
from ...engines.errors import one_line
from ...engines.openvino import core, own_signal_stack
from ...runtime import SamplingParams
from ..flags.bench import OWN
from ..flags.compared import OPENVINO_FLAGS, OPENVINO_MODEL, compared_folders
from ..timing.theirs import Theirs

PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
LOOKUP_TOKENS = 3  # compared for a match, as its examples do
SLACK = 64  # cache entries a row beyond its text: proposals, and the rest of a block


def exported_models(arguments: argparse.Namespace, bundle: Bundle, drafter: str) -> dict[str, Path]:
    """The named models by role, refused before anything is measured if they are not those of the bundle."""
    named = compared_folders(arguments, drafter)
    for role, folder in named.items():
        contract = bundle.models[role].contract
        heads, width = contract.states[0].shape
        expected = (contract.layers, heads, width, contract.vocab_size)
        if (found := _size(role, folder)) != expected:
            raise PairError(
                f"{OPENVINO_FLAGS[role]} {folder} is a model of {_in_words(*found)}, the bundle's {role} "
                f"{bundle.models[role].name} has {_in_words(*expected)}; export the checkpoint of the bundle"
            )
    return named


def _size(role: str, folder: Path) -> tuple[int, int, int, int]:
    """Layers, key/value heads, head size and vocabulary, read from the graph's state and logits."""
    import openvino

    file = folder / OPENVINO_MODEL
    try:
        model = openvino.Core().read_model(file)
        states = [variable.info.data_shape for variable in model.get_variables()]
        heads, width = (states[0][axis].get_length() for axis in (1, 3))
        return len(states) // 2, heads, width, model.output("logits").partial_shape[2].get_length()
    except (RuntimeError, IndexError) as error:  # what it raises, and a model without state
        raise RequestError(
            f"{file} is not a text model with its cache as state ({one_line(error)}); export it with "
            "--task text-generation-with-past"
        ) from error


def _in_words(layers: int, heads: int, width: int, vocabulary: int) -> str:
    return f"{layers} layers, {heads} key/value heads of {width} and {vocabulary} tokens"


def open_models(arguments: argparse.Namespace, bundle: Bundle, folders: Mapping[str, Path], longest: int) -> "OpenVino":
    contracts = [bundle.models[role].contract for role in folders]
    own = arguments.openvino_precision == OWN
    precision = None if own else PRECISIONS[bundle.target.contract.dtype]
    return OpenVino(folders, precision, arguments.batch, longest, _cache_gigabytes(contracts, arguments.batch, longest))


def _cache_gigabytes(contracts: Sequence[Contract], batch: int, longest: int) -> int:
    """Twice what the texts need in float32, because the pipeline divides it between the models by their size."""
    entry = sum(contract.in_dtype("float32").cache_bytes_per_token for contract in contracts)
    return -(-2 * entry * batch * (longest + SLACK) // 2**30)


class OpenVino:
    """A pipeline for each source of proposals, opened when it is first measured, on all cores of this process."""

    def __init__(
        self, folders: Mapping[str, Path], precision: str | None, batch: int, longest: int, cache_gigabytes: int
    ) -> None:
        self._folders = folders
        self._batch = batch
        self._properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": usable_cores()}
        if precision is not None:
            self._properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        self._prompt_tokens = batch * longest  # all prompts in one pass, as its pipeline for a single text does
        self._cache_gigabytes = cache_gigabytes
        self._pipelines: dict[str, Any] = {}

    def runs_as(self) -> dict[str, Any]:
        """Return the properties that the target has been compiled with."""
        import openvino

        compiled = core(openvino).compile_model(self._folders["target"] / OPENVINO_MODEL, "CPU", self._properties)
        names = (*self._properties, "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
        return {name: _plain(compiled.get_property(name)) for name in dict.fromkeys(names)}

    def measure(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], into: Theirs) -> None:
        """Decode all prompts once, a batch at a time."""
        tokens, ms = 0, 0.0
        into.texts = []
        for first in range(0, len(prompts), self._batch):
            group = slice(first, first + self._batch)
            try:
                counted, elapsed = self._decode_group(prompts[group], params[group], into)
            except RuntimeError as error:  # all that its bindings raise
                raise EngineError(
                    f"OpenVINO GenAI cannot run {' with '.join(map(str, self._folders.values()))} "
                    f"({one_line(error)}); export again for the version that is installed"
                ) from error
            tokens, ms = tokens + counted, ms + elapsed
        into.tokens_per_second.append(1e3 * tokens / ms)

    def _decode_group(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], into: Theirs
    ) -> tuple[int, float]:
        """Return the tokens that came while all rows were live, without the first of each, and the milliseconds."""
        import openvino

        pipeline = self._pipeline(into.setting.drafter)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        configs = [self._config(param, into) for param in params]
        began = perf_counter()
        handles = [pipeline.add_request(row, *each) for row, each in enumerate(zip(inputs, configs, strict=True))]
        texts: list[list[int]] = [[] for _ in handles]
        came_ms = [0.0] * len(handles)
        rest = [param.max_new_tokens for param in params]  # tokens that each row had to write before a step
        all_live: list[tuple[int, float]] = []  # tokens and milliseconds, after each step that left all rows live
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = 1e3 * (perf_counter() - began)
            for row, handle in enumerate(handles):
                if new := _read(handle):
                    into.waits.add(len(new), now - came_ms[row], first=not texts[row])
                    texts[row] += new
                    came_ms[row] = now
            if all(texts) and all(rest):
                all_live.append((sum(map(len, texts)), now))
            rest = [param.max_new_tokens - len(text) for text, param in zip(texts, params, strict=True)]
        into.texts += texts
        (first, began_ms), (last, ended_ms) = all_live[0], all_live[-1]
        return last - first, ended_ms - began_ms

    def _config(self, params: SamplingParams, into: Theirs) -> Any:
        import openvino_genai

        config = openvino_genai.GenerationConfig(
            max_new_tokens=params.max_new_tokens, ignore_eos=params.ignore_eos, do_sample=False
        )
        if into.setting.draft_length:
            config.num_assistant_tokens = into.setting.draft_length
        if into.setting.drafter == "lookup":
            config.max_ngram_size = LOOKUP_TOKENS
        return config

    def _pipeline(self, drafter: str) -> Any:
        if drafter not in self._pipelines:
            self._pipelines[drafter] = self._open(drafter)
        return self._pipelines[drafter]

    def _open(self, drafter: str) -> Any:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # or a repeat would find its prompts read
        scheduler.cache_size = self._cache_gigabytes
        scheduler.max_num_batched_tokens = self._prompt_tokens
        properties = dict(self._properties)
        if drafter == "model":
            properties["draft_model"] = openvino_genai.draft_model(self._folders["draft"], "CPU", **self._properties)
        elif drafter == "lookup":
            properties["prompt_lookup"] = True
        with own_signal_stack():
            return openvino_genai.ContinuousBatchingPipeline(self._folders["target"], scheduler, "CPU", properties)


def _read(handle: Any) -> list[int]:
    """The tokens that have come since the last look."""
    new: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            new += output.generated_ids
    return new


def _plain(value: Any) -> int | str:
    """A property as JSON has it: types of the library by their names."""
    return value if isinstance(value, int) else getattr(value, "to_string", value.__str__)()
