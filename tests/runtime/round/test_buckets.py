"""Rounds read as much of a long cache as the live rows need, and change neither text nor entries by it."""

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from trt_spec.engines import Step
from trt_spec.engines.torch import TorchEngine
from trt_spec.runtime import Decoder, Request, SamplingParams
from trt_spec.runtime.memory import bucket
from trt_spec.runtime.scheduling import capture

from ...kit.bundles import Pair
from ...kit.caches import probes, require_all_fresh
from ...kit.prompts import random_prompts
from ...kit.recorder import Recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """The torch engine as on a GPU, with buckets of 16, 32, 64, …"""
    recorder, open_ = Recorder(), TorchEngine.__init__

    def opened(self: TorchEngine, *arguments: Any, **options: Any) -> None:
        open_(self, *arguments, **options)
        self.static_capacity = self.reads_prefixes = True

    with (
        patch.object(capture, "Record", recorder),
        patch.object(capture, "new_pool", lambda: "pool"),
        patch.object(TorchEngine, "capturable", lambda self: True),
        patch.object(TorchEngine, "__init__", opened),
        patch.object(bucket, "SHORTEST", 16),
    ):
        yield recorder


@pytest.fixture
def read() -> Iterator[list[int]]:
    """How many entries of each row the steps read, one after another."""
    found: list[int] = []
    step = TorchEngine.step

    def watched(self: TorchEngine, inputs: Any, outputs: Any) -> Step:
        made = step(self, inputs, outputs)

        def run() -> None:
            found.append(inputs["past_key_0"].shape[2])
            made.run()

        return Step(made.inputs, made.outputs, run)

    with patch.object(TorchEngine, "step", watched):
        yield found


def test_each_bucket_is_recorded_once_and_rounds_run_ahead_within_it(
    llama: Pair, recorder: Recorder, read: list[int]
) -> None:
    params = SamplingParams(max_new_tokens=110, temperature=0, ignore_eos=True)
    with Decoder.open(llama.bundle, "torch", max_batch=1) as decoder:
        request = decoder.submit([5, 6, 7], params, draft_length=2)
        while decoder.step():
            pass
        kinds = dict(decoder._scheduler._rounds._seen)
    assert len(request.token_ids) == 110
    assert {plan.entries_read for plan in kinds} == {16, 32, 64, 128}
    assert all(records is not None for plan, records in kinds.items() if plan.entries_read > 16)
    assert recorder.most_unread >= 2
    assert read == sorted(read)


def test_texts_and_caches_are_those_of_whole_caches_at_every_border(llama: Pair, recorder: Recorder) -> None:
    """Rows come and go, so buckets grow and shrink, with rounds in flight; a step beyond its bucket would raise."""
    choose = random.Random(7)
    prompts = random_prompts(64, [choose.choice([1, 2, 13, 30, 61, 90]) for _ in range(9)], seed=5)
    settings = [
        SamplingParams(max_new_tokens=choose.choice([3, 20, 45]), temperature=i % 2, rule="coupled", seed=i)
        for i in range(len(prompts))
    ]
    with Decoder.open(llama.bundle) as decoder:
        expected = [output.token_ids for output in decoder.generate(prompts, settings, draft_length=0)]
    with Decoder.open(llama.bundle, "torch", max_batch=3) as decoder:
        engines = probes(llama)
        requests: list[Request] = []
        while decoder.step() or len(requests) < len(prompts):
            if choose.random() < 0.2:
                require_all_fresh(decoder, requests, engines)
            if len(requests) < len(prompts) and choose.random() < 0.3:
                requests.append(decoder.submit(prompts[len(requests)], settings[len(requests)], draft_length=2))
            for request in requests:
                if choose.random() < 0.03:
                    request.draft(choose.choice([0, 2, 4]), choose.choice(["model", "cascade", "lookup"]))
        kinds = dict(decoder._scheduler._rounds._seen)
    assert [tuple(request.token_ids) for request in requests] == expected
    assert {plan.entries_read for plan in kinds} >= {32, 64, 128}
    assert recorder.most_unread >= 2


def test_a_prompt_is_read_in_buckets_as_it_grows(llama: Pair, recorder: Recorder, read: list[int]) -> None:
    with Decoder.open(llama.bundle, "torch", max_batch=1) as decoder:
        decoder.generate([[5, 6, 7] * 9], SamplingParams(max_new_tokens=1), draft_length=0)
    assert read[:3] == [16, 32, 32], "tokens 0 to 15, 16 to 23 and 24 and 25"
