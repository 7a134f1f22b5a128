"""A target in shards, each in a process of its own, says what it says in one: bit for bit where sums are exact."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trt_spec.engines import Bundle, EngineError, RequestError
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.bundles import Pair
from ..kit.prompts import REPEATS
from ..kit.shards import in_shards

PROMPTS = [[5, 9, 17, 5, 9, 20, 33], REPEATS, [8, 2, 44], [5, 9, 17, 5, 9, 20, 33, 12, 13]]
TOKENS = 16
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
SAMPLED = [
    SamplingParams(max_new_tokens=TOKENS, temperature=1, seed=seed, top_p=0.9, ignore_eos=True)
    for seed in range(len(PROMPTS))
]
SHARDS = (2, 4)  # with four, two have the same head of keys
CHOICES = [(0, "none"), (3, "model"), ("3x2", "model"), (4, "suffix")]


@pytest.fixture(scope="module")
def folder(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shards in (1, *SHARDS):
        in_shards(llama.bundle, folder / str(shards), shards)
    return folder


def opened(folder: Path, shards: int, **options: object) -> Decoder:
    return Decoder.open(folder / str(shards), "torch", max_batch=3, prefix_bytes=2**22, **options)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[Decoder]:
    with opened(folder, 1) as decoder:
        yield decoder


@pytest.fixture(scope="module", params=[SHARDS[0], pytest.param(SHARDS[1], marks=pytest.mark.exhaustive)])
def sharded(folder: Path, request: pytest.FixtureRequest) -> Iterator[Decoder]:
    with opened(folder, request.param) as decoder:
        yield decoder


def texts(decoder: Decoder, params: object, length: object, drafter: str) -> list[tuple[int, ...]]:
    outputs = decoder.generate(PROMPTS, params, draft_length=length, drafter=drafter)
    if length and params is GREEDY:
        assert sum(output.speculation.accepted for output in outputs) > 0
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(("length", "drafter"), CHOICES)
def test_several_processes_say_what_one_says(whole: Decoder, sharded: Decoder, length: object, drafter: str) -> None:
    """There are more prompts than rows, so that rows move, and prefixes are found again."""
    for params in (GREEDY, SAMPLED):
        assert texts(sharded, params, length, drafter) == texts(whole, params, length, drafter)


def test_a_greedy_round_gathers_the_best_of_each_shard_alone(sharded: Decoder) -> None:
    sharded.generate(PROMPTS[:1], GREEDY, draft_length=0)
    logits = sharded._scheduler.frame.target_logits
    assert (logits > -torch.inf).sum(-1).unique().tolist() == [len(sharded.target.engine._team._others.lines) + 1]
    sharded.generate(PROMPTS[:1], SamplingParams(max_new_tokens=4, temperature=1, ignore_eos=True), draft_length=0)
    assert sharded._scheduler.frame.target_logits.isfinite().all(), "and one that draws, all"


def test_beams_of_several_processes_are_those_of_one(whole: Decoder, sharded: Decoder) -> None:
    beams = SamplingParams(max_new_tokens=8, num_beams=3, num_return_sequences=2, temperature=0)
    found, wanted = (one.generate(PROMPTS[:2], beams) for one in (sharded, whole))
    assert [[text.token_ids for text in output.beams] for output in found] == [
        [text.token_ids for text in output.beams] for output in wanted
    ]


@pytest.mark.parametrize("shards", SHARDS)
def test_each_process_holds_its_share_of_the_weights_and_of_the_cache(folder: Path, shards: int) -> None:
    whole, first = (folder / str(count) / "target" / "weights.bin" for count in (1, shards))
    held = [first.stat().st_size, *(one.stat().st_size for one in sorted(first.parent.glob("shard*/weights.bin")))]
    assert len(held) == shards
    assert max(held) <= 1.2 * whole.stat().st_size / shards  # of a tiny model norms are a part
    assert {state.shape[0] for state in Bundle.read(folder / str(shards)).target.contract.states} == {1}


@pytest.mark.parametrize(
    ("engine", "devices", "why"),
    [
        ("onnxruntime", None, "engine onnxruntime runs no shards, .* is one of 2; use engine torch or torch-compiled"),
        ("torch", ["cpu"], "the target of bundle .* is in 2 shards, got 1 device; name one for each"),
        ("torch", [], "got 0 devices"),
    ],
)
def test_what_cannot_run_shards_says_so(folder: Path, engine: str, devices: list[str] | None, why: str) -> None:
    with pytest.raises((EngineError, RequestError), match=why):
        Decoder.open(folder / "2", engine, devices=devices)


def test_devices_are_as_many_as_shards_also_for_one(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"the target of bundle .* is in 1 shard, got 2 devices"):
        Decoder.open(folder / "1", "torch", devices=["cpu", "cpu"])


def test_a_second_bundle_in_shards_is_refused_while_the_first_is_open(sharded: Decoder, folder: Path) -> None:
    """The processes of one group compute together, and a process is in one."""
    other = next(shards for shards in SHARDS if shards != len(sharded.target.engine._team._others.lines) + 1)
    with pytest.raises(EngineError, match="this process is in a group of torch"):
        opened(folder, other)
    sharded.generate(PROMPTS[:1], GREEDY)
