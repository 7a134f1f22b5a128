"""A model that sees answers what the library says of the same images, by each of the three APIs."""

import base64
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic
import pytest
from trt_spec.runtime import Decoder, RequestError, SamplingParams
from trt_spec.runtime.images.opening import MOST_BYTES, MOST_IMAGES
from trt_spec.runtime.images.reader import ImageReader
from trt_spec.tools.serving import fetching
from trt_spec.tools.serving import images as serving_images
from trt_spec.tools.serving.fetching import fetch
from trt_spec.tools.serving.held_pictures import HeldPictures

from ...kit.bundles import Pair
from ...kit.images import data_url, image_file
from ...kit.seeing_models import Seeing
from .conftest import Served, serving

TEMPLATE = (  # texts alone are strings, as most templates know them; where there is an image, there are parts
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}a:"
)
OF_PARTS = (  # as LLaVA's own: it writes no content that is a string
    "{% for m in messages %}{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"
)
FIRST, SECOND = image_file(40, 31), image_file(25, 60, "L", "JPEG")
ASKED: dict[str, Any] = {"model": "eyes", "max_tokens": 12, "temperature": 0}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def eyes(llava: Seeing) -> Iterator[Served]:
    with serving(llava, template=TEMPLATE, names=["eyes"]) as served:
        yield served


@pytest.fixture(scope="module")
def alone(llava: Seeing) -> Iterator[Decoder]:
    with Decoder.open(llava.bundle, max_batch=1) as decoder:
        yield decoder


def seen(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def messages(*urls: str, text: str = "what?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(seen, urls), {"type": "text", "text": text}]}]


def text_of(alone: Decoder, prompt: str, *images: bytes) -> str:
    params = SamplingParams(max_new_tokens=12, temperature=0)
    return alone.generate(prompt, params, images=[images], draft_length=0)[0].text


def refused(eyes: Served, sent: Any, **more: Any) -> dict[str, Any]:
    answer = eyes.post(PATH, ASKED | {"messages": sent} | more)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_chats_see_images_in_the_order_and_place_where_they_are_sent(eyes: Served, alone: Decoder):
    one, two = data_url(FIRST), data_url(SECOND)
    texts = set()
    for urls, images in (
        ((one,), [FIRST]),
        ((two,), [SECOND]),
        ((one, two), [FIRST, SECOND]),
        ((two, one), [SECOND, FIRST]),
    ):
        answer = eyes.openai.chat.completions.create(messages=messages(*urls), **ASKED)
        expected = text_of(alone, f"u:{'<image>' * len(urls)}what?;a:", *images)
        assert answer.choices[0].message.content == expected
        texts.add(expected)
        streamed = eyes.openai.chat.completions.create(messages=messages(*urls), stream=True, **ASKED)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
    assert len(texts) == 4, "the text goes by the images"


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "mistral3", "smolvlm"])
def test_chats_of_every_family_say_what_transformers_says(seeing_of: Callable[[str], Seeing], kind: str):
    one = seeing_of(kind)
    place, images = one.placeholder, [FIRST, SECOND]
    content = [seen(data_url(FIRST)), {"type": "text", "text": "\n\nwhat and "}, seen(data_url(SECOND))]
    body = ASKED | {"messages": [{"role": "user", "content": content}], "return_token_ids": True, "ignore_eos": True}
    with serving(one, template=TEMPLATE.replace("<image>", place), names=["eyes"]) as served:
        [choice] = served.post(PATH, body).json()["choices"]
        shown = served.post("/apply-template", {"messages": body["messages"]}).json()["prompt"]
    prompt = f"u:{place}\n\nwhat and {place};a:"
    assert choice["token_ids"] == one.said(prompt, images, 12)
    reader = ImageReader.open(one.bundle)
    assert shown == reader.surrounded(prompt, [reader.read(each) for each in images])


def test_a_conversation_keeps_the_images_of_its_turns(eyes: Served, alone: Decoder):
    sent = [*messages(data_url(FIRST)), {"role": "assistant", "content": "x"}, *messages(data_url(SECOND), text="and?")]
    answer = eyes.openai.chat.completions.create(messages=sent, **ASKED)
    prompt = "u:<image>what?;a:x;u:<image>and?;a:"
    assert answer.choices[0].message.content == text_of(alone, prompt, FIRST, SECOND)


def test_responses_and_messages_see_the_same(eyes: Served, alone: Decoder):
    expected, encoded = text_of(alone, "u:<image>what?;a:", FIRST), base64.b64encode(FIRST).decode()
    parts = [{"type": "input_image", "image_url": data_url(FIRST)}, {"type": "input_text", "text": "what?"}]
    asked = {"model": "eyes", "max_output_tokens": 12, "temperature": 0}
    answer = eyes.openai.responses.create(input=[{"role": "user", "content": parts}], **asked)
    assert answer.output_text == expected
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    plain = {"model": "eyes", "max_tokens": 12, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=eyes.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(messages=[{"role": "user", "content": blocks}], **plain)
        counted = client.messages.count_tokens(messages=[{"role": "user", "content": blocks}], model="eyes")
    assert message.content[0].text == expected
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_usage_and_counts_have_the_tokens_of_images(eyes: Served, alone: Decoder):
    body = ASKED | {"messages": messages(data_url(FIRST))}
    answer = eyes.post(PATH, body | {"return_token_ids": True}).json()
    picture = alone.images.read(FIRST)
    text = alone.tokenizer.encode("u:<image>what?;a:").ids
    assert answer["usage"]["prompt_tokens"] == len(text) + len(picture.tokens) - 1
    assert answer["choices"][0]["prompt_token_ids"] == alone.images.expand(text, [picture])
    counted = eyes.post(f"{PATH}/input_tokens", body).json()
    assert counted["input_tokens"] == answer["usage"]["prompt_tokens"]
    shown = eyes.post("/tokenize", {"messages": body["messages"]}).json()
    assert shown["tokens"] == answer["choices"][0]["prompt_token_ids"]


def test_texts_alone_are_written_by_templates_that_know_parts_alone(llava: Seeing, alone: Decoder):
    with serving(llava, template=OF_PARTS, names=["eyes"]) as served:
        plain = served.openai.chat.completions.create(messages=[{"role": "user", "content": "abc"}], **ASKED)
        assert plain.choices[0].message.content == text_of(alone, "abc")
        both = served.openai.chat.completions.create(messages=messages(data_url(FIRST)), **ASKED)
        assert both.choices[0].message.content == text_of(alone, "<image>what?", FIRST)


def test_a_placeholder_that_a_user_spells_stays_text(eyes: Served, alone: Decoder):
    answer = eyes.openai.chat.completions.create(messages=messages(data_url(FIRST), text="<image>"), **ASKED)
    spelled = [token for character in "<image>" for token in alone.tokenizer.encode(character).ids]
    ids = [*alone.tokenizer.encode("u:<image>").ids, *spelled, *alone.tokenizer.encode(";a:").ids]
    params = SamplingParams(max_new_tokens=12, temperature=0)
    assert answer.choices[0].message.content == alone.generate(ids, params, images=[[FIRST]])[0].text


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64,", "an image has 0 bytes, expected 1 to 20,971,520"),
        ("data:image/png;base64,AAAA", "an image cannot be read ("),
        ("data:image/png;base64,A*AA", "a data URL that is not base64"),
        ("data:image/png,AAAA", "a data URL without ;base64,"),
        (data_url(FIRST[:60]), "an image cannot be read ("),
        (
            data_url(image_file(9, 9, kind="BMP")),
            "expected a whole file of PNG",
        ),
        ("https://example.com/a.png", "images from example.com are not fetched here; send the image as a data URL"),
        ("file:///etc/passwd", "a URL that is neither data: nor http(s)://HOST"),
        ("http://user@example.com/a.png", "a URL that is neither data: nor http(s)://HOST"),
        ("http://[a/b", "an image has no valid URL"),
    ],
)
def test_what_is_no_image_is_one_sentence(eyes: Served, url: str, said: str):
    error = refused(eyes, messages(url))
    assert said in error["message"]
    assert error["param"] == "messages"
    among = refused(eyes, messages(data_url(FIRST), url))
    assert among == error | {"message": f"image 2 of 2: {error['message']}"}


def test_a_request_that_is_refused_without_its_images_is_refused_before_they_are_read(eyes: Served):
    broken = "data:image/png;base64,AAAA"
    assert refused(eyes, messages(broken, text="x" * 2**20))["code"] == "context_length_exceeded"
    cut = refused(eyes, messages(broken), truncate_prompt_tokens=4)
    assert cut["message"].startswith("truncate_prompt_tokens could cut an image in two")


def test_images_are_bounded(eyes: Served):
    many = refused(eyes, messages(*[data_url(FIRST)] * (MOST_IMAGES + 1)))
    assert many["message"] == "there are 33 images, expected at most 32; send less"
    large = refused(eyes, messages("data:;base64," + "A" * (4 * (MOST_BYTES // 3 + 2))))
    assert large["message"] == "an image has more than 20,971,520 bytes; send a smaller one"
    whole = eyes.post(PATH, ASKED | {"messages": messages("x" * 2**25)})
    assert (whole.status_code, whole.json()["error"]["code"]) == (413, "body_too_large")
    cut = refused(eyes, messages(data_url(FIRST)), truncate_prompt_tokens=4)
    assert cut["message"].startswith("truncate_prompt_tokens could cut an image in two")
    long = refused(eyes, messages(*[data_url(FIRST)] * 2), max_tokens=eyes.service.max_length - 30)
    assert long["code"] == "context_length_exceeded", "images count as what they become"


def test_pictures_count_until_nobody_holds_them(alone: Decoder):
    held, picture = HeldPictures(), alone.images.read(FIRST)
    held.add(picture)
    assert held.bytes == picture.inputs["pixels"].nbytes
    del picture
    gc.collect()
    assert held.bytes == 0


def test_images_are_refused_while_others_take_the_memory(eyes: Served, monkeypatch: pytest.MonkeyPatch):
    gc.collect()
    assert eyes.service.images.held.bytes == 0, "those of requests that have ended count no more"
    monkeypatch.setattr(serving_images, "MOST_HELD_BYTES", 0)
    answer = eyes.post(PATH, ASKED | {"messages": messages(data_url(FIRST), data_url(SECOND))})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "the server holds as many images as it may; try again soon" in answer.text


def test_hosts_of_images_are_for_models_that_see(llama: Pair):
    with pytest.raises(RequestError, match="but the model reads text alone; leave it out"):  # noqa: SIM117
        with serving(llama, image_hosts=["example.com"]):
            pass


def test_a_template_that_knows_no_images_is_named(llava: Seeing):
    with serving(llava, template="{% for m in messages %}{{ m.content }}{% endfor %}", names=["eyes"]) as served:
        error = refused(served, messages(data_url(FIRST)))
    assert error["message"].startswith("the chat template writes 0 places for 1 image; give one that knows images")


class Pages(BaseHTTPRequestHandler):
    """A site with an image, and paths that lead elsewhere."""

    def do_GET(self) -> None:
        if self.path == "/drop-by-drop":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # until the other side has enough
                while not threading.Event().wait(0.01):
                    self.wfile.write(b"x")
            return
        if self.path == "/slowly-round":
            threading.Event().wait(0.15)
        onward = {
            "/slowly-round": "/slowly-round",
            "/moved": "/image.png",
            "/away": "http://elsewhere.example/",
            "/round": "/round",
            "/torn": "http://[x",
        }.get(self.path)
        self.send_response(200 if self.path.endswith(".png") else 302 if onward else 404)
        if onward:
            self.send_header("Location", onward)
        sent = {"/image.png": len(FIRST), "/half.png": 2 * len(FIRST)}.get(self.path, 0)
        self.send_header("Content-Length", str(sent))
        self.end_headers()
        if sent:
            self.wfile.write(FIRST)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_images_of_hosts_that_are_named_are_fetched_and_no_others(llava: Seeing, alone: Decoder, site: str):
    port = site.rpartition(":")[2]
    with serving(llava, template=TEMPLATE, names=["eyes"], image_hosts=[site, f"LOCALHOST:{port}"]) as served:
        for path in ("/image.png", "/moved"):
            answer = served.openai.chat.completions.create(messages=messages(f"http://{site}{path}"), **ASKED)
            assert answer.choices[0].message.content == text_of(alone, "u:<image>what?;a:", FIRST)
        for url, said in (
            (f"http://{site}/away", "images from elsewhere.example are not fetched here"),
            (f"http://{site}/round", "redirected more than 3 times"),
            (f"http://{site}/torn", "an image cannot be fetched from 127.0.0.1 within 10 s"),
            (f"http://{site}/half.png", "cannot be fetched from 127.0.0.1 within 10 s (its end did not come)"),
            (f"http://{site}/none", "answers 404 for an image, expected 200"),
            ("http://127.0.0.1/image.png", "images from 127.0.0.1 are not fetched here"),
            (f"https://{site}/image.png", "an image cannot be fetched from 127.0.0.1 within 10 s"),
        ):
            assert said in refused(served, messages(url))["message"]


def test_what_comes_drop_by_drop_is_cut_in_time(site: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"cannot be fetched from 127\.0\.0\.1 within 0\.2 s"):
        fetch(f"http://{site}/drop-by-drop", [site])


def test_all_redirects_have_one_time_together(site: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "SECONDS", 0.4)  # of four places that take 0.15 each
    with pytest.raises(RequestError, match=r"cannot be fetched from 127\.0\.0\.1 within 0\.4 s"):
        fetch(f"http://{site}/slowly-round", [site])


def test_a_name_that_is_not_resolved_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    asked = threading.Event()
    monkeypatch.setattr(fetching, "SECONDS", 0.1)
    monkeypatch.setattr(fetching.socket, "getaddrinfo", lambda *_, **__: [asked.wait()][1:])
    try:
        with pytest.raises(RequestError, match=r"from a\.example within 0\.1 s \(its name is not resolved\)"):
            fetch("http://a.example/image.png", ["a.example"])
    finally:
        asked.set()


def test_a_name_may_lead_to_a_private_address_only_if_that_is_named(llava: Seeing, site: str):
    port = site.rpartition(":")[2]
    with serving(llava, template=TEMPLATE, names=["eyes"], image_hosts=[f"localhost:{port}"]) as served:
        error = refused(served, messages(f"http://localhost:{port}/image.png"))
    assert "localhost has the address" in error["message"]
    assert "which is not of the public internet; name it by --image-hosts, too" in error["message"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("64:ff9b::808:808", True),  # of 8.8.8.8
        ("127.0.0.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),  # of 127.0.0.1
        ("2002:7f00:1::", False),
        ("fe80::1%eth0", False),
        ("224.0.0.1", False),
        ("ff02::1", False),
    ],
)
def test_addresses_that_stand_for_others_are_judged_by_these(address: str, public: bool) -> None:
    assert fetching._is_public(address) == public


def test_an_image_is_refused_if_others_have_taken_the_memory_while_it_waited(
    eyes: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = eyes.service.decoder.images
    assert reader is not None
    monkeypatch.setattr(serving_images, "MOST_HELD_BYTES", 0)
    first = eyes.service.images.read(reader, FIRST)
    with pytest.raises(Exception, match="the server holds as many images as it may"):
        eyes.service.images.read(reader, SECOND)
    del first
