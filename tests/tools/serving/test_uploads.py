"""Uploads of four megabytes keep no stream waiting: between a round and its chunks little of them is read."""

import json
import threading

import httpx
import pytest
from trt_spec.tools.serving import delivery, raw_bodies
from trt_spec.tools.serving.connections import MOST_PART
from trt_spec.tools.serving.stepper import Stepper
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...kit.bundles import Pair
from .conftest import serving

UPLOADS, STREAMS = 4, 8
STREAM = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True, "draft_length": 0}
UPLOAD = json.dumps({"prompt": "a" * (4 * 2**20 - 1000)}).encode()
TURNS = 2  # of the event loop, from the news of a round to its chunks; in each, every upload may be read a part


class Between:
    """Counts the bytes and the bodies that are read from the news of a round to each of its chunks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[int] = []
        self.bodies: list[int] = []
        self._read = self._bodies = 0
        self._before(monkeypatch, Stepper, "_hear", self._begin)
        self._before(monkeypatch, H11Protocol, "data_received", self._note_bytes)
        self._before(monkeypatch, raw_bodies, "read_body", self._note_body)
        self._before(monkeypatch, delivery, "part", self._note_chunk)

    def _before(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, note) -> None:
        call = getattr(owner, name)

        def noting(*arguments, **more):
            note(*arguments)
            return call(*arguments, **more)

        monkeypatch.setattr(owner, name, noting)

    def _begin(self, *_: object) -> None:
        self._read = self._bodies = 0

    def _note_bytes(self, connection: object, data: bytes) -> None:
        self._read += len(data)

    def _note_body(self, raw: bytes, kind: object) -> None:
        self._bodies += len(raw) > MOST_PART

    def _note_chunk(self, *_: object) -> None:
        self.read.append(self._read)
        self.bodies.append(self._bodies)


def test_between_a_round_and_its_chunks_each_upload_is_read_a_part_a_turn(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    between, uploaded, statuses = Between(monkeypatch), threading.Event(), []
    with serving(llama, max_batch=STREAMS) as server:

        def stream() -> None:
            while not uploaded.is_set():
                httpx.post(f"{server.url}/v1/completions", json=STREAM, timeout=60)

        def upload() -> None:
            for _ in range(3):
                headers = {"content-type": "application/json"}
                answer = httpx.post(f"{server.url}/v1/completions", content=UPLOAD, headers=headers, timeout=60)
                statuses.append(answer.status_code)

        streams = [threading.Thread(target=stream) for _ in range(STREAMS)]
        uploads = [threading.Thread(target=upload) for _ in range(UPLOADS)]
        for one in (*streams, *uploads):
            one.start()
        for one in uploads:
            one.join()
        uploaded.set()
        for one in streams:
            one.join()
    assert statuses == [400] * 3 * UPLOADS
    assert sum(map(bool, between.read)) > 10, "some chunks came while bodies were read"
    assert max(between.read) <= TURNS * UPLOADS * MOST_PART + STREAMS * 1000, "what the streams send is short"
    assert max(between.bodies) <= 1
