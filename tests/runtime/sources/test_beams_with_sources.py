"""Beams behind a source find what transformers finds; all of them stand behind the one source of their row."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trt_spec.runtime import Decoder

from ...kit.beams import OF_FIFTY, SETTINGS, assert_theirs, found, ours, theirs
from ...kit.bundles import export_pair
from ...kit.source_models import END, example_sources, tiny_with_source, writer

TOKENS = 20
FORCED = 7


DRAFTED = [("none", 0), ("model", 3), ("model2", 3), ("model3", 2)]


def assert_equal_to_transformers(
    kind: str, bundle: Path, count: int, settings: list[dict[str, Any]], drafts: Sequence[Sequence[tuple[str, int]]]
) -> None:
    """Each setting with drafts of its own."""
    sources = example_sources(kind, count)
    with Decoder.open(bundle, max_batch=2) as decoder:
        for asked, drafted in zip(settings, drafts, strict=True):
            write = writer(kind, bundle.parent / "target", **theirs(asked, TOKENS))
            expected = [found(write(source), 1, [END]) for source in sources]
            for drafter, length in drafted:
                params = ours(asked, max_new_tokens=TOKENS)
                outputs = decoder.generate(sources=sources, params=params, drafter=drafter, draft_length=length)
                for output, wanted in zip(outputs, expected, strict=True):
                    assert_theirs(output, wanted)


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_the_texts_are_those_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    drafts = [[DRAFTED[i], DRAFTED[(i + 1) % 4]] for i in (range(3) if kind == "t5" else range(1, 4))]
    assert_equal_to_transformers(kind, request.getfixturevalue(kind), 3, SETTINGS[1:4], drafts)


@pytest.mark.exhaustive
def test_fifty_sources_of_each_number_of_beams(t5: Path) -> None:
    assert_equal_to_transformers("t5", t5, 50, OF_FIFTY, [DRAFTED[:2]] * len(OF_FIFTY))


def test_a_token_that_the_model_is_made_to_begin_with_counts_in_the_length_of_a_text(tmp_path: Path) -> None:
    checkpoint = tiny_with_source("bart", tmp_path / "checkpoint")
    settings = json.loads((checkpoint / "generation_config.json").read_text()) | {"forced_bos_token_id": FORCED}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    bundle = export_pair(checkpoint, tmp_path / "bundle", max_length=128).bundle
    sources = example_sources("bart", 6)
    asked = {"num_beams": 4, "length_penalty": 3.0}
    with Decoder.open(bundle) as decoder:
        params = ours(asked, max_new_tokens=TOKENS)
        ends = [END, *{output.token_ids[9] for output in decoder.generate(sources=sources, params=params)}]
        outputs = decoder.generate(sources=sources, params=replace(params, stop_token_ids=ends))
    write = writer("bart", checkpoint, forced_bos_token_id=FORCED, eos_token_id=ends, **theirs(asked, 1 + TOKENS))
    for source, output in zip(sources, outputs, strict=True):
        assert_theirs(output, found(write(source), 2, ends))
    assert len({len(beam.token_ids) for output in outputs for beam in output.beams}) > 1
