"""Beams behind a source find what transformers finds; all of them stand behind the one source of their row."""

from pathlib import Path

import pytest
from trt_spec.runtime import Decoder

from ...kit.beams import SETTINGS, assert_theirs, found, ours, theirs
from ...source_models import END, example_sources, writer

TOKENS = 20


def assert_equal_to_transformers(kind: str, bundle: Path, count: int) -> None:
    sources = example_sources(kind, count)
    with Decoder.open(bundle, max_batch=2) as decoder:
        for asked in SETTINGS[1:4]:
            write = writer(kind, bundle.parent / "target", **theirs(asked, TOKENS))
            expected = [found(write(source), 1, [END]) for source in sources]
            for drafter, length in (("none", 0), ("model", 3), ("model2", 3), ("model3", 2)):
                params = ours(asked, max_new_tokens=TOKENS)
                outputs = decoder.generate(sources=sources, params=params, drafter=drafter, draft_length=length)
                for output, wanted in zip(outputs, expected, strict=True):
                    assert_theirs(output, wanted)


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_the_texts_are_those_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    assert_equal_to_transformers(kind, request.getfixturevalue(kind), 3)
