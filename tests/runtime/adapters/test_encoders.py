"""Encoders have adapters, too, and so do the keys that decoders ask of a source: texts are those of PEFT."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
from trt_spec.export import ExportReport, export_bundle
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.scheduling import reading

from ...kit.adapters import ROOM, adapter_of
from ...kit.source_models import example_sources, noisy_copy, said_by_transformers, tiny_with_source

pytestmark = pytest.mark.exhaustive
TOKENS = 16
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
ROWS = [(name, place) for name in ("one", None, "other", "one") for place in range(2)]  # their adapters and sources
LAYERS = {
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "whisper": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "bart": ["q_proj", "v_proj", "fc1"],
}


@dataclass(frozen=True)
class Adapted:
    report: ExportReport
    folders: dict[str, Path]
    sources: list[Any]
    expected: list[list[int]]  # of each row

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Decoder]:
        with Decoder.open(self.report.path, **options) as decoder:
            for name, folder in self.folders.items():
                decoder.load_adapter(name, folder)
            yield decoder

    def said(self, decoder: Decoder, length: object) -> list[list[int]]:
        rows = [
            decoder.submit(params=GREEDY, source=self.sources[place], adapter=name, draft_length=length)
            for name, place in ROWS
        ]
        while decoder.step():
            pass
        return [list(one.output().token_ids) for one in rows]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    made: dict[str, Adapted] = {}

    def make(kind: str) -> Adapted:
        if kind not in made:
            made[kind] = _adapted(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


def _adapted(kind: str, folder: Path) -> Adapted:
    """Make a pair that shares its encoder, and two adapters of every layer."""
    base = tiny_with_source(kind, folder / "base")
    draft = noisy_copy(kind, base, folder / "draft", 0.05, encoder=False)
    loaded = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    own = {"kind": loaded, "task_type": "SEQ_2_SEQ_LM", "target_modules": LAYERS[kind]}
    folders = {name: adapter_of(base, folder / name, seed, **own) for seed, name in enumerate(("one", "other"))}
    sources = example_sources(kind, 2)
    said = {name: said_by_transformers(kind, base, sources, TOKENS, folders.get(name)) for name in (None, *folders)}
    assert len({tuple(map(tuple, texts)) for texts in said.values()}) == 3
    expected = [said[name][place] for name, place in ROWS]
    return Adapted(export_bundle(base, folder / "bundle", draft=draft, **ROOM), folders, sources, expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_each_row_of_a_batch_has_its_own(adapted: Callable[[str], Adapted], kind: str) -> None:
    own = adapted(kind)
    with own.opened() as decoder:
        for length in (0, 3, "2x2"):
            assert own.said(decoder, length) == own.expected


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_engine_torch_says_the_same(adapted: Callable[[str], Adapted], kind: str) -> None:
    own = adapted(kind)
    with own.opened(engine="torch", prefix_bytes=2**22) as decoder:
        assert own.said(decoder, 3) == own.expected
        assert own.said(decoder, 3) == own.expected  # of what was kept


def test_the_export_compares_the_encoder_with_the_checkpoint(adapted: Callable[[str], Adapted]) -> None:
    [encoder] = adapted("t5").report.encoders
    assert 0 < encoder.entry.check["adapters"]["worst_error"] < 1e-4
    names = {one.name for one in encoder.entry.contract.adapters.products}
    assert "encoder.block.0.layer.0.SelfAttention.q" in names
    assert any(name.endswith("decoder.block.1.layer.1.EncDecAttention.v") for name in names)


@pytest.mark.parametrize("forgotten", ["key", "adapter"])
def test_what_was_made_with_another_adapter_shows(adapted: Callable[[str], Adapted], forgotten: str) -> None:
    """The control: a source is known to all, or is read as if it had no adapter."""
    own, wanted = adapted("t5"), reading.Wanted

    def forgetful(key: str, source: Any, adapter: Any) -> Any:
        return wanted(source.digest, source, adapter) if forgotten == "key" else wanted(key, source, None)

    with patch.object(reading, "Wanted", forgetful), own.opened() as decoder:
        assert own.said(decoder, 3) != own.expected
