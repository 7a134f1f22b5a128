"""A draft with tokens of its own proposes behind the server, which answers as plain decoding does."""

from collections.abc import Iterator

import pytest

from ...kit.bundles import Pair, export_pair
from ...kit.foreign import in_other_tokens
from .conftest import Served, serving

BODY = {"prompt": "ab ab", "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("foreign")
    draft = in_other_tokens(llama.checkpoint, folder / "draft")
    with serving(export_pair(llama.checkpoint, folder / "bundle", draft)) as server:
        yield server


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7, "rule": "coupled"}])
def test_answers_are_those_of_plain_decoding(served: Served, sampling: dict[str, object]) -> None:
    asked = ({"draft_length": 0}, {}, {"drafter": "common", "draft_length": 4}, {"drafter": "text", "draft_length": 4})
    answers = [served.post("/v1/completions", BODY | sampling | one).json() for one in asked]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    metrics = served.http.get("/metrics").text
    assert all(f'accepted_tokens_total{{drafter="{drafter}"' in metrics for drafter in ("common", "text"))
