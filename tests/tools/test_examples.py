"""The example scripts run as they stand, on any bundle, and do what they say."""

import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trt_spec.runtime import Decoder, EngineError, SamplingParams
from trt_spec.runtime.round import round as round_
from trt_spec.tools.examples.service import Service

from ..kit.bundles import Pair
from ..kit.shards import in_shards

EXAMPLES = Path(__file__).parents[2] / "tools" / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`script(name, …)` runs an example as its own program and returns what it printed."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def service(llama: Pair):
    service = Service(str(llama.bundle))
    yield service
    service.close()


def test_each_example_is_short_and_has_a_test():
    scripts = {file.name: file for file in EXAMPLES.glob("[!_]*.py")}
    assert set(scripts) == {"stream.py", "service.py", "bench_your_prompts.py", "ray_serve.py"}
    for name, file in scripts.items():
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 50, name


def test_stream_prints_the_output_and_counts_the_drafts_tokens(script, llama: Pair):
    printed = script("stream.py", llama.bundle, "abc")
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        [output] = decoder.generate("abc", SamplingParams(max_new_tokens=64, temperature=0.8, seed=7))
    last = f"{output.speculation.accepted} of {len(output.token_ids)} tokens were proposed by the draft and accepted"
    assert output.speculation.accepted > 0
    assert printed == f"abc{output.text}\n\n{last}\n"


def test_bench_measures_each_draft_length_on_the_given_prompts(script, llama: Pair, tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("abc\nxyz\n")
    head, *rows, last = script("bench_your_prompts.py", llama.bundle, file).splitlines()
    assert head.split() == ["K", "tokens/s", "speed-up", "tokens", "a", "round"]
    cells = [row.split() for row in rows]
    assert [cell[0] for cell in cells] == ["0", "2", "4", "8"]
    assert cells[0][2:] == ["1.00x", "1.00"]
    assert all(float(cell[1]) > 0 and float(cell[3]) > 1 for cell in cells[1:])
    assert last == "the same texts at every K"


def test_the_service_answers_every_thread_and_refuses_the_empty_prompt(script, llama: Pair):
    printed = script("service.py", llama.bundle, "abc", "xyz", "")
    with Decoder.open(llama.bundle) as decoder:
        outputs = decoder.generate(["abc", "xyz"])
    for prompt, output in zip(("abc", "xyz"), outputs, strict=True):
        assert f"{prompt}{output.text}\n\n" in printed
        assert f"{len(output.token_ids)} tokens\n" in printed
    assert printed.endswith("the prompt is empty; give at least one token\n")


def test_the_service_raises_a_failed_round_to_its_owners_and_goes_on(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    accept, left = round_.accept, [1]

    def fail_once(*arguments: object) -> None:
        if left:
            left.pop()
            raise RuntimeError("the engine failed")
        accept(*arguments)

    expected = service.complete("abc")
    monkeypatch.setattr(round_, "accept", fail_once)
    with pytest.raises(EngineError, match=r"a round failed \(RuntimeError: the engine failed\)"):
        service.complete("abc")
    assert "a round failed: the engine failed" in capsys.readouterr().err
    with ThreadPoolExecutor() as clients:
        assert list(clients.map(service.complete, ["abc"] * 10)) == [expected] * 10


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ray beside the environment of the tests."""
    home, root = tmp_path_factory.mktemp("ray"), EXAMPLES.parents[1]
    wanted = ["-r", root / ".ci/ray.txt", "-c", root / ".ci/constraints.txt", "--target", home]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *map(str, wanted)], check=True)
    return home


@pytest.mark.replicas
@pytest.mark.parametrize("shards", [1, 2])
def test_a_replica_of_ray_serve_streams_the_tokens_that_the_library_says(
    llama: Pair, ray: Path, tmp_path: Path, shards: int
):
    for count in {1, shards}:
        in_shards(llama.bundle, tmp_path / str(count), count)
    paths = {"PYTHONPATH": f"{ray}:{EXAMPLES.parents[1] / '.package'}", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(EXAMPLES / "ray_serve.py"), str(tmp_path / str(shards)), "torch"]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with Decoder.open(tmp_path / "1", "torch") as decoder:
        [output] = decoder.generate([[1, 2, 3]], SamplingParams(max_new_tokens=32))
    lines = [line for line in done.stdout.splitlines() if line.replace(" ", "").isdecimal()]
    assert [int(token) for line in lines for token in line.split()] == list(output.token_ids)
    assert len(lines) > 3, "round by round"
