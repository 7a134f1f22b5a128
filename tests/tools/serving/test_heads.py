"""A head proposes behind the server's APIs as it does without one: the answers are those of plain decoding."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from trt_spec.tools.making.kept_bundles import DEMO_DRAFTS, TARGET

from ...kit.bundles import export_pair
from .conftest import Served, serving

BODY = {"prompt": "def read_config(", "max_tokens": 40, "ignore_eos": True}
RULES = ({"temperature": 0}, {"temperature": 1, "seed": 7, "rule": "coupled"})


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo's target and the EAGLE-3 head that is shipped for it, served as `--drafter eagle3` does."""
    folder: Path = tmp_path_factory.mktemp("headed")
    pair = export_pair(TARGET, folder / "bundle", DEMO_DRAFTS["eagle3"], max_length=256)
    with serving(pair, drafter="eagle3") as server:
        yield server


def tokens_by_drafter(served: Served, kind: str) -> dict[str, float]:
    found = re.findall(
        rf'trt_spec:{kind}_tokens_total{{drafter="([^"]+)",[^}}]*}} (\S+)', served.http.get("/metrics").text
    )
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("sampling", RULES)
def test_answers_are_those_of_plain_decoding(headed: Served, sampling: dict[str, object]) -> None:
    before = tokens_by_drafter(headed, "accepted").get("eagle3", 0)
    alone, drafted = (
        headed.post("/v1/completions", BODY | sampling | fields).json() for fields in ({"draft_length": 0}, {})
    )
    [expected] = [choice["text"] for choice in alone["choices"]]
    assert len(expected) > 40
    assert [choice["text"] for choice in drafted["choices"]] == [expected]
    body = BODY | sampling
    ours = {name: body.pop(name) for name in ("ignore_eos", "rule") if name in body}
    stream = headed.openai.completions.create(model="tiny", stream=True, extra_body=ours, **body)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    assert tokens_by_drafter(headed, "accepted")["eagle3"] > before + 10, "the head has proposed them"


def test_metrics_tell_by_drafter_what_was_proposed_and_what_stood(headed: Served) -> None:
    assert headed.post("/v1/completions", BODY | {"temperature": 0, "draft_length": 4}).status_code == 200
    one = tokens_by_drafter(headed, "proposed")
    copied = {"temperature": 0, "draft_length": 4, "drafter": "suffix"}
    assert headed.post("/v1/completions", BODY | copied).status_code == 200
    proposed, accepted = tokens_by_drafter(headed, "proposed"), tokens_by_drafter(headed, "accepted")
    assert "suffix" not in one
    assert proposed["eagle3"] == one["eagle3"]
    assert proposed["suffix"] >= accepted["suffix"] > 0
