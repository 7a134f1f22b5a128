"""A round can be one CUDA graph: nothing in it is read by the host, and replaying it is running it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from trt_spec.engines import Bundle, Contract, Step
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import Decoder, SamplingParams, capture
from trt_spec.runtime import clock as clock_module
from trt_spec.runtime.clock import PARTS, Clock
from trt_spec.runtime.drafters import SOURCES
from trt_spec.runtime.frame import Frame
from trt_spec.runtime.model import Model
from trt_spec.runtime.ngram import read_ngrams
from trt_spec.runtime.noise import _constants
from trt_spec.runtime.result import tabulate
from trt_spec.runtime.round import run_round
from trt_spec.runtime.rows import Plan, Rows

from ..bundles import Pair
from ..recorder import Recorder

KINDS = {
    "plain": Plan(2, 0, coupled=True),
    "greedy": Plan(2, 3, model=True, coupled=True),
    "rejection": Plan(2, 3, model=True, rejection=True, tempered=True),
    "own draft temperature": Plan(2, 3, model=True, rejection=True, own_draft=True),
    "coupled": Plan(2, 3, model=True, coupled=True, gumbel=True),
    "both rules": Plan(3, 2, model=True, rejection=True, coupled=True, gumbel=True, ragged=True),
    "lenient": Plan(2, 3, model=True, rejection=True, coupled=True, lenient=True),
    "lookup": Plan(2, 3, lookup=True, rejection=True, ragged=True),
    "two drafters": Plan(2, 3, model=True, lookup=True, rejection=True, ragged=True),
    "suffix": Plan(2, 3, suffix=True, rejection=True),
    "ngram": Plan(2, 3, ngram=True, rejection=True, ragged=True),
    "random": Plan(2, 3, random=True, coupled=True, gumbel=True),
    "cascade": Plan(2, 3, cascade=True, rejection=True, coupled=True, gumbel=True, ragged=True, penalised=True),
    "one guess": Plan(2, 1, cascade=True, coupled=True, ragged=True),
    "all drafters": Plan(
        2,
        3,
        cascade=True,
        model=True,
        lookup=True,
        suffix=True,
        ngram=True,
        random=True,
        rejection=True,
        coupled=True,
        ragged=True,
    ),
    "filters": Plan(2, 3, model=True, rejection=True, top_k=True, top_p=True, min_p=True, biased=True, penalised=True),
    "log-probs and trace": Plan(2, 3, model=True, rejection=True, logprobs=2, traced=True),
}


class MetaEngine:
    """Does nothing where there is nothing."""

    device = "meta"
    static_capacity = True
    verify_width, prefill_width = 17, 256

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def bind(self, cache: Mapping[str, Tensor]) -> None:
        assert all(buffer.is_meta for buffer in cache.values())

    def step(self, first_row: int, input_ids: Tensor, start: Tensor, logits: Tensor) -> Step:
        return Step(input_ids, start, logits, lambda: None)

    def capturable(self) -> bool:
        return True

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", KINDS)
def test_no_operation_of_a_round_reads_a_tensor_on_the_host(llama: Pair, kind: str) -> None:
    """On meta tensors, which have no values to read, and which take the same branches as those of a GPU."""
    bundle, plan = Bundle.open(llama.bundle), KINDS[kind]
    vocab = bundle.tokenizer.vocab_size
    engines = [MetaEngine(entry.contract) for entry in bundle.models.values()]
    target, draft = (Model(engine, vocab, 4, bundle.capacity) for engine in engines)
    rows = Rows.allocate(4, bundle.capacity, vocab, "meta").view(plan.batch)
    before = dict(vars(rows))
    ngrams = replace(read_ngrams(bundle, "meta"), longest=2, widest=64)
    frame = Frame(plan, target, draft, ngrams)
    _constants(rows.length.device)  # made in the two rounds before a capture
    brought = AssertionError("a number of the host is brought to the device, for which the GPU waits")
    with (
        torch.inference_mode(),
        patch.object(torch, "tensor", side_effect=brought),
        patch.object(torch, "as_tensor", side_effect=brought),
    ):
        table = tabulate(run_round(rows, plan, frame, bundle.capacity), plan)
    assert table.is_meta
    assert table.shape[0] == plan.batch
    assert all(tensor is before[name] for name, tensor in vars(rows).items()), "written where they are"


@pytest.mark.parametrize(
    "read", [lambda x: x.item(), lambda x: x.tolist(), lambda x: x.numpy(), lambda x: x.nonzero(), lambda x: bool(x)]
)
def test_meta_tensors_do_notice_a_host_that_reads(read: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        read(torch.zeros(1, device="meta"))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Rounds of ONNX Runtime as if they could be captured, with a cache that stays where it is."""
    recorder, open_ = Recorder(), OnnxRuntimeEngine.__init__

    def opened(self: OnnxRuntimeEngine, *arguments: Any) -> None:
        open_(self, *arguments)
        self.static_capacity = True

    with (
        patch.object(capture, "record", recorder),
        patch.object(capture, "new_pool", lambda: "pool"),
        patch.object(OnnxRuntimeEngine, "capturable", lambda self: True),
        patch.object(OnnxRuntimeEngine, "__init__", opened),
    ):
        yield recorder


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=40, temperature=0),
        SamplingParams(max_new_tokens=40, seed=3, top_p=0.9, presence_penalty=0.5),
        SamplingParams(max_new_tokens=40, seed=3, rule="coupled", logprobs=2),
    ],
)
@pytest.mark.parametrize("drafter", SOURCES)
def test_replayed_rounds_write_the_same_text(
    llama: Pair, recorder: Recorder, params: SamplingParams, drafter: str
) -> None:
    prompts = ["def f(", "abc abc abc abc", "x"]

    def texts() -> list[tuple[int, ...]]:
        with Decoder.open(llama.bundle, max_batch=3) as decoder:
            outputs = [*decoder.generate(prompts, params, drafter=drafter), *decoder.generate(prompts[1:], params)]
        assert all(output.logprobs for output in outputs) == (params.logprobs is not None)
        return [output.token_ids for output in outputs]

    found = texts()
    assert sum(recorder.records) > 20, "most rounds were replayed"
    assert len(recorder.records) < 12, "a record for each kind of round, not for each round"
    with patch.object(OnnxRuntimeEngine, "capturable", lambda self: False):
        assert texts() == found


def test_a_kind_of_round_is_recorded_when_it_comes_back(llama: Pair, recorder: Recorder) -> None:
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        request = decoder.submit("def f(", SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True))
        replayed = []
        for _ in range(5):
            decoder.step()
            replayed.append(sum(recorder.records))
        assert (len(recorder.records), replayed) == (1, [0, 0, 1, 2, 3])
        request.draft_length = 2
        for _ in range(3):
            decoder.step()
        assert recorder.records == [3, 1]
        request.draft_length = 4
        decoder.step()
        assert recorder.records == [4, 1], "the first record still holds"


def test_times_of_the_parts_are_those_of_the_latest_round(llama: Pair, recorder: Recorder) -> None:
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        request = decoder.submit("def f(", SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True))
        for _ in range(3):
            decoder.step()
        before = request.speculation.verify_ms
        with patch.object(Clock, "parts", lambda self: (1.0, 20.0, 3.0)):
            decoder.step()
        assert sum(recorder.records) == 2
        assert request.speculation.verify_ms == pytest.approx(before + 20)


def test_a_clock_tells_its_parts() -> None:
    clock = Clock("cpu")
    with patch.object(clock_module, "perf_counter", iter([0, 0.5, 2, 5, 9]).__next__):
        for part in range(PARTS):
            clock.mark(part)
    assert clock.parts() == pytest.approx((1500, 3000, 4500)), "milliseconds"


def test_nothing_of_a_recorded_round_moves_on_a_gpu() -> None:
    rows = Rows.allocate(2, 64, 10, "meta")
    assert rows.bias.shape == rows.prompt_counts.shape == rows.output_counts.shape == (2, 10)
    assert Rows.allocate(2, 64, 10, "cpu").bias.shape == (2, 0), "memory that few need"
