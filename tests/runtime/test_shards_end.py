"""Shards go on together after preemption, and end together: if one has gone, and with the process that leads them."""

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from trt_spec.engines import EngineEnded, EngineError
from trt_spec.engines.torch.parallel import team
from trt_spec.engines.torch.parallel.commands import Packed
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.full import CacheFull

from ..kit.bundles import Pair
from ..kit.families import tiny_checkpoint
from ..kit.headed import Headed
from ..kit.shards import gathered, in_shards

PROMPT = [5, 9, 17, 5, 9, 20, 33]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("shards") / "bundle"
    in_shards(llama.bundle, bundle, 2)
    return bundle


def test_rows_that_give_up_their_place_go_on_in_all_shards(llama: Pair, bundle: Path) -> None:
    """From blocks that were kept."""
    prompts, long = [PROMPT, [*PROMPT, 12, 13], [8, 2, 44]], replace(GREEDY, max_new_tokens=60)
    in_shards(llama.bundle, bundle.with_name("whole"), 1)
    with Decoder.open(bundle.with_name("whole"), "torch", max_batch=3) as decoder:
        wanted = decoder.generate(prompts, long, draft_length=3)
    with Decoder.open(bundle, "torch", max_batch=3, prefix_bytes=2**22) as decoder:
        requests = [decoder.submit(prompt, long, draft_length=3) for prompt in prompts]
        for _ in range(10):
            decoder.step()
        for _ in range(2):
            decoder._scheduler.seating.preempt(CacheFull("the test takes their places"))
        run(decoder)
    assert [one.output().token_ids for one in requests] == [one.token_ids for one in wanted]


@pytest.mark.exhaustive
def test_a_head_reads_the_features_that_the_first_shard_keeps(every_kind: dict[str, Headed], tmp_path: Path) -> None:
    said = []
    for shards in (1, 2):
        in_shards(every_kind["eagle3"].bundle, tmp_path / str(shards), shards)
        with Decoder.open(tmp_path / str(shards), "torch", max_batch=2) as decoder:
            for length in (3, "3x2"):
                [output] = decoder.generate([PROMPT], GREEDY, draft_length=length, drafter="eagle3", trace=True)
                said.append((output.token_ids, [one.proposal for one in output.trace]))
    assert said[:2] == said[2:]


def run(decoder: Decoder) -> None:
    while decoder.step():
        pass


def test_a_shard_that_dies_ends_all_with_one_error(bundle: Path) -> None:
    with Decoder.open(bundle, "torch", max_batch=3) as decoder:
        request = decoder.submit(PROMPT, GREEDY)
        decoder.step()
        [process] = decoder.target.engine._team._others._processes
        decoder.target.engine.require()
        process.kill()
        with pytest.raises(EngineEnded, match="shard 1 of the target has ended with status -9; open the bundle again"):
            run(decoder)
        assert request.finished
        later = decoder.submit(PROMPT, GREEDY)
        with pytest.raises(EngineError, match="shard 1 of the target has ended"):
            run(decoder)
        assert later.finished
        again = Decoder.open(bundle, "torch", max_batch=3)
    with again:  # and the other is closed
        again.generate([PROMPT], GREEDY)
    assert not team._open


def test_a_lack_of_memory_on_one_device_hangs_nothing(bundle: Path) -> None:
    """The other shards are in the middle of the call by then."""
    with Decoder.open(bundle, "torch", max_batch=1) as decoder:
        decoder.generate([PROMPT], GREEDY)
        with (
            patch.object(Packed, "pack", side_effect=torch.OutOfMemoryError("none is left")),
            pytest.raises(EngineError, match="memory"),
        ):
            decoder.generate([PROMPT], GREEDY)
        with pytest.raises(EngineError, match="open the bundle again"):
            decoder.generate([PROMPT], GREEDY)


def test_that_a_shard_has_gone_is_known_while_there_is_nothing_to_do(bundle: Path) -> None:
    with Decoder.open(bundle, "torch", max_batch=1) as decoder:
        [process] = decoder.target.engine._team._others._processes
        process.kill()
        process.wait()
        for _ in range(2):
            with pytest.raises(EngineEnded, match="shard 1 of the target has ended with status -9"):
                decoder.target.engine.require()


@pytest.mark.exhaustive
def test_that_a_shard_has_gone_is_known_while_a_step_waits_for_it(llama: Pair, tmp_path: Path) -> None:
    """Where nothing lets the step fail, as on GPUs. The other shards wait for it as well, and are ended."""
    in_shards(llama.bundle, tmp_path / "bundle", 4)
    with Decoder.open(tmp_path / "bundle", "torch", max_batch=1) as decoder:
        engine, known = decoder.target.engine, queue.SimpleQueue[str]()
        processes = engine._team._others._processes
        assert engine.gone() == ""
        with engine._team._working:  # as a step has it
            processes[1].kill()
            processes[1].wait()
            asks = threading.Thread(target=lambda: known.put(engine.gone()))
            asks.start()
            assert known.get(timeout=30) == "shard 2 of the target has ended with status -9"
        assert [process.wait(30) for process in processes] == [-9] * 3
        asks.join()
        with pytest.raises(EngineEnded):
            engine.require()
        assert engine.gone() == "", "they have been ended"


@pytest.mark.parametrize("said", [b"", b"{}", b"x" * 64])
def test_strangers_that_call_are_sent_away(said: bytes) -> None:
    secret = b"s" * 64
    with socket.create_server(("127.0.0.1", 0)) as server:
        callers = [socket.create_connection(server.getsockname()) for _ in range(2)]
        for caller, message in zip(callers, (said, secret), strict=True):
            caller.sendall(message)
            caller.shutdown(socket.SHUT_WR)
        gathering = gathered([])
        gathering._accept(server, secret, 1)
        [known] = gathering.lines
        assert known._socket.getpeername() == callers[1].getsockname()
        for each in (known, *callers):
            each.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["deepseek_v3", "bamba"])
def test_latent_attention_and_recurrent_layers_decode_in_shards(family: str, tmp_path: Path) -> None:
    export_bundle(tiny_checkpoint(family, tmp_path / "checkpoint"), tmp_path / "bundle", check=False)
    said = []
    for shards in (1, 2):
        in_shards(tmp_path / "bundle", tmp_path / str(shards), shards)
        with Decoder.open(tmp_path / str(shards), "torch", max_batch=2, prefix_bytes=2**22) as decoder:
            prompts = [[3, 4, 5, 6] * 12, PROMPT, [3, 4, 5, 6] * 12 + [7]]
            for length, drafter in ((4, "suffix"), ("2+3", "random")):
                outputs = decoder.generate(prompts, GREEDY, draft_length=length, drafter=drafter)
                said.append([(one.token_ids, one.speculation.accepted) for one in outputs])
    assert said[:2] == said[2:]


def test_shards_end_with_the_process_that_leads_them(bundle: Path) -> None:
    """Whatever ends it: they have a session of their own, and signals of a terminal do not reach them."""
    leads = (
        "import sys\nfrom trt_spec.runtime import Decoder\n"
        f"decoder = Decoder.open({str(bundle)!r}, 'torch', max_batch=1)\n"
        "print(decoder.target.engine._team._others._processes[0].pid, flush=True)\nsys.stdin.read()\n"
    )
    leader = subprocess.Popen([sys.executable, "-c", leads], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert leader.stdout is not None
    follower = int(leader.stdout.readline())
    os.kill(follower, signal.SIGTERM)  # which the leader alone obeys
    os.kill(follower, 0)
    leader.kill()
    leader.communicate()
    with os.fdopen(os.pidfd_open(follower)) as ended:
        assert select.select([ended], [], [], 60)[0], "the shard is still there"
