"""Commands run targets in shards: one that the command starts, those of torchrun on two nodes, and a server's."""

import subprocess
import sys
from pathlib import Path

import pytest
from trt_spec.tools.cli import main

from ..kit.bundles import Pair
from ..kit.shards import in_shards

COMMAND = Path(sys.executable).with_name("trt-spec")
ASKED = ["--engine", "torch", "--prompt", "hello", "--max-new-tokens", "12"]
CLOSES_NOTHING = """
import sys
from trt_spec.runtime import Decoder, SamplingParams
decoder = Decoder.open(sys.argv[1], engine="torch")
decoder.generate("hello", SamplingParams(max_new_tokens=4))
"""


def test_a_server_refuses_another_number_of_shards_than_the_bundle_has(
    llama: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(llama.bundle), "--tensor-parallel", "2"]) == 2
    assert "is in 1 shards, not in 2; leave --tensor-parallel out, or export it so" in capsys.readouterr().err


def test_inspect_says_what_each_shard_holds(llama: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_shards(llama.bundle, tmp_path / "bundle", 2)
    assert main(["inspect", str(tmp_path / "bundle")]) == 0
    assert "in each of 2 shards" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_torchrun_starts_a_process_for_each_shard_on_two_nodes(llama: Pair, tmp_path: Path) -> None:
    in_shards(llama.bundle, tmp_path / "1", 1)
    in_shards(llama.bundle, tmp_path / "2", 2)
    generate = [str(COMMAND), "generate", *ASKED, "--bundle"]
    node = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--no-python"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29511"]
    nodes = [
        subprocess.Popen([*node, *meeting, *generate, str(tmp_path / "2")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    texts = [one.communicate(timeout=300)[0] for one in nodes]
    assert [one.returncode for one in nodes] == [0, 0]
    alone = subprocess.run([*generate, str(tmp_path / "1")], capture_output=True, text=True, check=True).stdout
    assert sorted(texts) == ["", alone]


@pytest.mark.exhaustive
def test_shards_that_nobody_has_closed_end_without_a_word(llama: Pair, tmp_path: Path) -> None:
    in_shards(llama.bundle, tmp_path / "bundle", 2)
    ended = subprocess.run(
        [sys.executable, "-c", CLOSES_NOTHING, tmp_path / "bundle"], stderr=subprocess.PIPE, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
