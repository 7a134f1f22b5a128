"""A model with an encoder takes a text as `source` of a completion, and says what the library says of it."""

from collections.abc import Iterator

import pytest
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.bundles import Pair
from .conftest import Served, serving

PATH = "/v1/completions"
SOURCES = ("return name file", "create new list", "value must be string")
ASKED = {"prompt": "", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def writing(telegrams: Pair) -> Iterator[Served]:
    with serving(telegrams, names=["t5"], template=None) as served:
        yield served


@pytest.fixture(scope="module")
def expected(telegrams: Pair) -> list[str]:
    params = SamplingParams(max_new_tokens=8, temperature=0)
    with Decoder.open(telegrams.bundle, max_batch=1) as decoder:
        texts = [decoder.generate(sources=[one], params=params, draft_length=0)[0].text for one in SOURCES]
    assert len(set(texts)) == len(texts), "the text goes by the source"
    return texts


def test_the_client_of_openai_gets_what_the_library_writes_behind_a_source(writing: Served, expected) -> None:
    for source, text in zip(SOURCES, expected, strict=True):
        ids = writing.decoder.tokenizer.encode(source).ids
        for given in (source, ids):
            body = {"model": "t5", "prompt": "", "max_tokens": 8, "temperature": 0, "extra_body": {"source": given}}
            whole = writing.openai.completions.create(**body)
            assert whole.choices[0].text == text
            streamed = writing.openai.completions.create(**body, stream=True)
            assert "".join(chunk.choices[0].text for chunk in streamed) == text


def test_a_prompt_is_what_the_text_begins_with(telegrams: Pair, writing: Served) -> None:
    begun = writing.post(PATH, ASKED | {"source": SOURCES[0], "prompt": ["The", ""], "n": 2, "echo": True}).json()
    params = SamplingParams(max_new_tokens=8, temperature=0)
    with Decoder.open(telegrams.bundle, max_batch=1) as decoder:
        plain = [decoder.generate([one], params, sources=SOURCES[:1])[0].text for one in ("The", "")]
    assert [one["text"] for one in begun["choices"]] == [f"The{plain[0]}"] * 2 + [plain[1]] * 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "the model has an encoder: send the text to /v1/completions as source"),
        ({"source": [10**6]}, "source token id 1000000 is outside the vocabulary"),
        ({"source": [5] * 3000}, "the source has 3,000 tokens, expected 1 to 2,048"),
        ({"source": []}, "source is refused"),
        ({"source": 7}, "source is refused"),
    ],
)
def test_a_source_that_is_missing_or_cannot_be_read_is_refused(writing: Served, fields, said: str) -> None:
    answer = writing.post(PATH, ASKED | fields)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "source"


def test_other_models_have_no_source_and_chats_have_none(served: Served, writing: Served) -> None:
    refused = served.post(PATH, {"prompt": [5], "source": "abc"}).json()["error"]
    assert (refused["message"], refused["param"]) == (
        "source is for models with an encoder of text, as T5 has; leave it out",
        "source",
    )
    chat = writing.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert chat.status_code == 400
