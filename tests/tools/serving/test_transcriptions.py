"""Sound in a form is written down as the library writes it down, in the shapes of OpenAI's API."""

import concurrent.futures as futures
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForSpeechSeq2Seq
from trt_spec.runtime import Decoder
from trt_spec.runtime.transcribing import fallback
from trt_spec.runtime.transcribing.transcriber import Transcriber
from trt_spec.tools.serving import transcriptions
from trt_spec.tools.serving.allowances import Allowances
from trt_spec.tools.serving.guard import MOST_SOUND_BYTES
from trt_spec.tools.serving.transcriptions import Listening
from trt_spec.tools.sound_files import sound_of

from ...kit.adapters import adapter_of
from ...kit.bundles import Pair, export_pair
from ...kit.sounds import wav
from ...kit.source_models import tiny_listener
from .conftest import Served, serving

PATH = "/v1/audio/transcriptions"
NOISE = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).numpy() / 10
SOUND = wav(NOISE, 16_000, 2)


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("listener")
    return export_pair(tiny_listener(folder / "several"), folder / "bundle")


@pytest.fixture(scope="module")
def listening(listener: Pair) -> Iterator[Served]:
    with serving(listener, names=["whisper"], template=None) as served:
        yield served


@pytest.fixture(scope="module")
def expected(listener: Pair):
    with Decoder.open(listener.bundle) as decoder:
        return Transcriber(decoder).transcribe(sound_of(SOUND, "noise"), language="de")


def ask(served: Served, path: str = PATH, file: bytes = SOUND, **fields):
    return served.http.post(path, files={"file": ("noise.wav", file)}, data=fields)


def test_the_client_of_openai_gets_what_the_library_hears(listening: Served, expected) -> None:
    ask_for = listening.openai.audio.transcriptions.create
    file = ("noise.wav", SOUND)
    plain = ask_for(model="whisper", file=file, language="de")
    assert plain.text == expected.text
    assert plain.usage.seconds == expected.seconds
    verbose = ask_for(
        model="whisper", file=file, language="de", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (verbose.text, verbose.language, float(verbose.duration)) == (expected.text, "de", expected.seconds)
    found = [(one.start, one.end, one.text, tuple(one.tokens)) for one in verbose.segments]
    assert found == [(one.start, one.end, one.text, one.token_ids) for one in expected.segments]
    subtitles = ask_for(model="whisper", file=file, language="de", response_format="srt")
    assert subtitles.startswith("1\n00:00:00,")
    assert ask_for(model="whisper", file=file, language="de", response_format="text") == expected.text + "\n"


def test_a_prompt_is_read_and_what_is_not_good_enough_is_heard_again_if_asked_for(
    listening: Served, listener: Pair, expected, monkeypatch
) -> None:
    asked, before = [], Listening.next

    async def noting(self):
        asked.append(self._asked.params.temperature)
        return await before(self)

    monkeypatch.setattr(Listening, "next", noting)
    prompt = "\u4e07\u4e08\u4e09"
    with Decoder.open(listener.bundle) as decoder:
        prompted = Transcriber(decoder).transcribe(sound_of(SOUND, "noise"), language="de", prompt=prompt)
    assert ask(listening, language="de", prompt=prompt).json()["text"] == prompted.text != expected.text
    monkeypatch.setattr(fallback, "USUAL", fallback.Fallback((1e-4,), logprob_threshold=0.0))
    asked.clear()
    again = listening.openai.audio.transcriptions.create(
        model="whisper", file=("noise.wav", SOUND), language="de", extra_body={"fallback": True}
    )
    assert again.text == expected.text
    assert asked == [0, 1e-4] * (len(asked) // 2)


def test_a_stream_has_an_event_for_each_piece_and_ends_with_the_whole(listening: Served, expected) -> None:
    events = list(
        listening.openai.audio.transcriptions.create(
            model="whisper", file=("noise.wav", SOUND), language="de", stream=True
        )
    )
    assert [one.type for one in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert len(events) == len(expected.segments) + 1
    assert "".join(one.delta for one in events[:-1]) == events[-1].text == expected.text


def test_a_translation_is_the_other_task(listening: Served, listener: Pair) -> None:
    with Decoder.open(listener.bundle) as decoder:
        expected = Transcriber(decoder).transcribe(sound_of(SOUND, "noise"), task="translate")
    found = listening.openai.audio.translations.create(model="whisper", file=("noise.wav", SOUND))
    assert found.text == expected.text


def test_sounds_of_several_clients_are_heard_together_and_beside_a_client_that_leaves(listening: Served) -> None:
    with futures.ThreadPoolExecutor(6) as pool:
        with pytest.raises(Exception, match="timed out"):
            listening.http.post(PATH, files={"file": ("a.wav", SOUND)}, data={"language": "de"}, timeout=0.01)
        texts = {one.json()["text"] for one in pool.map(lambda _: ask(listening, language="de"), range(6))}
    assert len(texts) == 1


def test_all_windows_are_heard_with_the_adapter_that_was_named(tmp_path, monkeypatch) -> None:
    """Also if another is loaded in its place meanwhile."""
    base = tiny_listener(tmp_path / "base")
    pair = export_pair(base, tmp_path / "bundle", adapters=3, adapter_rank=4)
    own = {"kind": AutoModelForSpeechSeq2Seq, "task_type": "SEQ_2_SEQ_LM", "target_modules": ["q_proj", "v_proj"]}
    one, other = (adapter_of(base, tmp_path / name, seed, **own) for seed, name in enumerate(("one", "other")))
    before = Listening.next
    with serving(pair, names=["whisper"], template=None, adapters=[("one", one), ("other", other)]) as served:
        texts = {name: ask(served, model=name, language="de").json()["text"] for name in ("whisper", "one", "other")}
        assert len(set(texts.values())) == 3
        decoder = served.service.decoder

        async def meddling(self):
            found = await before(self)
            if decoder.adapters["one"] == one:
                decoder.unload_adapter("one")
                decoder.load_adapter("one", other)
            return found

        monkeypatch.setattr(Listening, "next", meddling)
        assert ask(served, model="one", language="de").json()["text"] == texts["one"]
        assert ask(served, model="one", language="de").json()["text"] == texts["other"]


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"language": "xx"}, 400, "language is 'xx', this model knows de, en"),
        ({"model": "other"}, 404, "model 'other' is not served here"),
        ({"response_format": "pdf"}, 400, "a field of the form is refused: Invalid enum value 'pdf'"),
        ({"temperature": "2"}, 400, "a field of the form is refused: Expected `float` <= 1.0"),
        ({"temperature": "warm"}, 400, "a field of the form is refused: Expected `float`"),
        ({"stream": "perhaps"}, 400, "stream is 'perhaps', expected true or false"),
        ({"prompt": "<|en|>"}, 400, "the prompt has the special token <|en|>, expected plain text"),
        ({"fallback": "perhaps"}, 400, "fallback is 'perhaps', expected true or false"),
        ({"include[]": "logprobs"}, 400, "include[] is not supported: no log-probabilities are given; leave it out"),
        ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities are for segments alone"),
        ({"odd": "1"}, 400, "a field of the form is refused: Object contains unknown field `odd`"),
    ],
)
def test_a_field_that_is_refused_is_named(listening: Served, fields: dict, status: int, reason: str) -> None:
    answer = ask(listening, **fields)
    assert (answer.status_code, reason in answer.json()["error"]["message"]) == (status, True), answer.text


def test_bodies_that_are_no_sound_are_refused_in_a_sentence(listening: Served, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    http = listening.http
    assert http.post(PATH, json={}).status_code == 415
    assert "has no file" in http.post(PATH, data={"model": "whisper"}, files={"other": b"a"}).json()["error"]["message"]
    assert "is no WAV file of PCM" in ask(listening, file=b"ID3").json()["error"]["message"]
    assert "cannot be read" in http.post(PATH, content=b"a", headers={"content-type": "multipart/form-data"}).text
    refused = http.post(PATH, content=bytes(MOST_SOUND_BYTES + 1))
    assert (refused.status_code, "more than 26,214,400 bytes" in refused.text) == (413, True)


def test_a_page_of_another_site_may_not_send_forms(listening: Served) -> None:
    headers = {"origin": "https://elsewhere.example"}
    answer = listening.http.post(PATH, files={"file": ("a.wav", SOUND)}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_refused")


def test_what_does_not_hear_says_so_and_what_hears_needs_a_source(served: Served, listening: Served) -> None:
    assert "does not hear as Whisper does" in ask(served).json()["error"]["message"]
    answer = listening.post("/v1/completions", {"prompt": [1], "max_tokens": 2})
    assert (answer.status_code, "send sound to /v1/audio/transcriptions" in answer.text) == (400, True)


def test_a_failure_in_the_middle_is_told_to_clients_of_both_kinds(listening: Served, monkeypatch) -> None:
    def fails(self, output):
        raise RuntimeError("a bug")

    monkeypatch.setattr(transcriptions.Listening, "_send", fails)
    with pytest.raises(openai.InternalServerError, match="the server has failed"):
        listening.openai.audio.transcriptions.create(model="whisper", file=("noise.wav", SOUND), language="de")
    answer = ask(listening, language="de", stream="true")
    assert "internal_error" in answer.text


def test_a_form_that_has_begun_is_finished_where_the_server_drains(listener: Pair, expected, monkeypatch) -> None:
    with (
        serving(listener, names=["whisper"], template=None, drain_seconds=30) as served,
        futures.ThreadPoolExecutor(1) as pool,
    ):
        begun, send = threading.Event(), transcriptions.Listening._send

        def first(self, output):
            if not begun.is_set():
                begun.set()
                served.end()
                time.sleep(0.3)  # in which the server has no request of the form
            return send(self, output)

        monkeypatch.setattr(transcriptions.Listening, "_send", first)
        answer = pool.submit(ask, served, language="de")
        begun.wait(30)
        time.sleep(0.1)
        assert answer.result().json()["text"] == expected.text


def test_a_form_that_has_begun_keeps_its_place_and_others_are_told_to_come_back(
    listener: Pair, expected, monkeypatch
) -> None:
    with (
        serving(listener, names=["whisper"], template=None, max_batch=1, max_waiting=0) as served,
        futures.ThreadPoolExecutor(1) as pool,
    ):
        begun, send, told = threading.Event(), transcriptions.Listening._send, threading.Event()

        def slowly(self, output):
            begun.set()
            told.wait(30)
            return send(self, output)

        monkeypatch.setattr(transcriptions.Listening, "_send", slowly)
        answer = pool.submit(ask, served, language="de")
        begun.wait(30)
        full = ask(served, language="de")
        told.set()
        assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
        assert answer.result().json()["text"] == expected.text
        assert ask(served, language="de").status_code == 200
        assert served.service.stepper.places == []


def test_a_key_has_no_more_forms_under_way_than_rows(listener: Pair, monkeypatch) -> None:
    own = {"names": ["whisper"], "template": None, "keys": ["a", "b"], "allowances": Allowances(rows=1)}
    with serving(listener, **own) as served, futures.ThreadPoolExecutor(1) as pool:
        begun, send, told = threading.Event(), transcriptions.Listening._send, threading.Event()

        def slowly(self, output):
            begun.set()
            told.wait(30)
            return send(self, output)

        def ask_as(key: str) -> httpx.Response:
            file = {"file": ("noise.wav", SOUND)}
            return httpx.post(f"{served.url}{PATH}", files=file, headers={"x-api-key": key}, timeout=60)

        monkeypatch.setattr(transcriptions.Listening, "_send", slowly)
        answer = pool.submit(ask_as, "a")
        begun.wait(30)
        refused = ask_as("a")
        told.set()
        assert (refused.status_code, "this key has 1 completions under way" in refused.text) == (429, True)
        assert ask_as("b").status_code == answer.result().status_code == ask_as("a").status_code == 200


def test_a_silent_stream_says_that_it_is_alive(listening: Served, monkeypatch) -> None:
    send = transcriptions.Listening._send

    def slowly(self, output):
        time.sleep(0.2)
        return send(self, output)

    monkeypatch.setattr(transcriptions.Listening, "_send", slowly)
    monkeypatch.setattr(listening.service, "keep_alive_seconds", 0.05)
    answer = ask(listening, language="de", stream="true")
    assert ": keep-alive" in answer.text
    assert "transcript.text.done" in answer.text


@pytest.mark.parametrize("origins", [["https://elsewhere.example"], ["*"]])
def test_a_page_that_is_allowed_may_send_forms(listener: Pair, origins: list[str]) -> None:
    with serving(listener, names=["whisper"], template=None, origins=origins) as served:
        headers = {"origin": "https://elsewhere.example"}
        answer = served.http.post(PATH, files={"file": ("a.wav", SOUND)}, headers=headers)
        assert answer.status_code == 200
