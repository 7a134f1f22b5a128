"""A frontend of NVIDIA Dynamo and its workers, as processes."""

import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[3]
MODEL = "pycode-14m"


class Cluster:
    """A frontend and its workers, as processes."""

    def __init__(self, home: Path, packages: Path, bundle: Path) -> None:
        here = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST")
        self.environment = os.environ | dict.fromkeys(here, "127.0.0.1")
        self.environment |= {
            "PYTHONPATH": f"{packages}:{ROOT / '.package'}",
            "DYN_FILE_KV": str(home / "found"),
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
            "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "400",
        }
        self._home, self._bundle = home, bundle
        self.processes: list[subprocess.Popen[bytes]] = []
        self.url, self.port = f"http://127.0.0.1:{free_port()}", free_port()

    def start(self, name: str, module: str, *flags: object, **environment: str) -> None:
        with (self._home / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", module, "--discovery-backend", "file", *map(str, flags)]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment | environment)
        self.processes.append(process)

    def start_worker(self, name: str, *flags: object, **environment: str) -> subprocess.Popen[bytes]:
        flags = ("--bundle", self._bundle, "--max-batch", 16, *flags)
        self.start(name, "trt_spec.tools.dynamo.worker", *flags, **environment)
        return self.processes[-1]

    def start_frontend(self) -> None:
        where = ("--http-host", "127.0.0.1", "--http-port", self.url.rpartition(":")[2])
        self.start("frontend", "dynamo.frontend", *where, "--router-mode", "kv", "--migration-limit", 3)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        return (self._home / f"{name}.log").read_text(errors="replace")

    def wait_for_workers(self, count: int) -> None:
        """Wait until the frontend has sent a request to each of so many."""
        self.until(lambda: len(self.workers()) == count)

    def workers(self) -> set[int]:
        try:
            answers = [self.ask("abc", max_tokens=1, nvext={"extra_fields": ["worker_id"]}) for _ in range(4)]
        except httpx.HTTPError:
            return set()
        return {worker_of(answer) for answer in answers}

    def ask(self, prompt: object, **fields: object) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/completions", json=body_of(prompt, fields), timeout=60)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def until(self, holds: Any) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            logs = "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in self._home.glob("*.log"))
            assert time.monotonic() < deadline, logs
            time.sleep(0.2)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"dynamo_frontend_{name}{{"))


def free_port() -> int:
    """Return a port below 32768: Dynamo reads that of a worker as a number of 16 bits with a sign."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(20_000, 2**15))) as listener:
            return int(listener.getsockname()[1])


def body_of(prompt: object, fields: dict[str, object]) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}


def worker_of(answer: dict[str, Any]) -> int:
    return int(answer["nvext"]["worker_id"]["decode_worker_id"])
