"""Encoder–decoders: what stands behind an encoder says what it says in transformers, or is refused by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from trt_spec.engines import Bundle, BundleError, EngineError, ExportError
from trt_spec.export import export_bundle
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
from trt_spec.export.families.table import WITH_SOURCES
from trt_spec.export.writing import encoders as export_encoders
from trt_spec.runtime import Decoder, SamplingParams

from ..engines.parity import assert_engine_agrees
from ..kit.bundles import Pair, export_pair
from ..kit.families import tiny_checkpoint
from ..kit.source_models import END, example_sources, said_by_transformers, tiny_with_source, writer

TOKENS = 24


@pytest.mark.parametrize(
    ("kind", "count"),
    [("t5", 8), ("whisper", 8), *(pytest.param(kind, 50, marks=pytest.mark.exhaustive) for kind in WITH_SOURCES)],
)
def test_a_family_passes_the_check_and_its_greedy_texts_are_transformers(tmp_path: Path, kind: str, count: int) -> None:
    checkpoint = tiny_with_source(kind, tmp_path / "checkpoint")
    report = export_bundle(checkpoint, tmp_path / "bundle")
    for entry in (report.models[0].entry, report.encoders[0].entry):
        # float32 rounding, of both sides: of mT5's logits torch's own are off by 1.5e-4 of that from those in float64
        assert entry.check["worst_error"] < 3e-4 * max(1.0, entry.check["logit_std"])
    sources = example_sources(kind, count)
    expected = said_by_transformers(kind, checkpoint, sources, TOKENS)
    assert len(set(map(tuple, expected))) > 1  # the text goes by the source
    params = SamplingParams(max_new_tokens=TOKENS, min_tokens=TOKENS)
    with Decoder.open(tmp_path / "bundle") as decoder:
        for drafter, length in (("none", 0), ("suffix", 4)):
            outputs = decoder.generate(sources=sources, params=params, drafter=drafter, draft_length=length)
            assert [list(output.token_ids) for output in outputs] == expected
    assert_engine_agrees(tmp_path / "bundle")
    with pytest.raises(EngineError, match="engine openvino takes no state of the kind 'source'"):
        Decoder.open(tmp_path / "bundle", "openvino")


def test_a_decoder_may_be_deeper_than_its_encoder(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_with_source("t5", tmp_path / "checkpoint", num_decoder_layers=3))
    assert checkpoint.shape.contract(64, "float32").layers == 3


@pytest.mark.exhaustive
def test_the_graph_of_a_decoder_that_is_deeper_passes_its_check(tmp_path: Path) -> None:
    checkpoint = tiny_with_source("t5", tmp_path / "checkpoint", num_decoder_layers=3)
    entry = export_bundle(checkpoint, tmp_path / "bundle").models[0].entry
    assert entry.contract.layers == 3
    assert entry.check["worst_error"] < 2e-4 * max(1.0, entry.check["logit_std"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["bart", "m2m_100", "marian", "t5", "umt5", "whisper"])
def test_no_factor_of_hidden_states_is_rounded_to_bfloat16(tmp_path: Path, kind: str) -> None:
    checkpoint = tiny_with_source(kind, tmp_path / "checkpoint")
    report = export_bundle(checkpoint, tmp_path / "bundle", dtype="bfloat16")
    for entry in (report.models[0].entry, report.encoders[0].entry):
        assert entry.check["worst_error"] < 2e-4  # rounded, they would move logits by ten times as much


def test_drafts_share_the_encoder_of_their_target_if_it_is_the_same(t5: Path) -> None:
    bundle = Bundle.open(t5)
    feeds = {name: list(encoder.contract.feeds) for name, encoder in bundle.encoders.items()}
    assert feeds == {"encoder": ["target", "draft"], "draft2_encoder": ["draft2"]}
    assert [bundle.longest_source(name) for name in bundle.names] == [2048, 2048, 2048, 0]  # T5 has no last position


def test_a_search_that_its_makers_recommend_is_said(tmp_path: Path) -> None:
    checkpoint = tiny_with_source("bart", tmp_path / "checkpoint")
    settings = json.loads((checkpoint / "generation_config.json").read_text())
    settings |= {"num_beams": 4, "no_repeat_ngram_size": 3}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    [note] = export_bundle(checkpoint, tmp_path / "bundle", check=False).notes
    assert note.endswith(
        "checkpoint asks for num_beams 4, which requests may ask for: say --num-beams; and for "
        "no_repeat_ngram_size 3, which this version does not do"
    )


def test_an_encoder_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_with_source("t5", tmp_path / "checkpoint")
    write = export_encoders.write_graph

    def wrong(graph, folder: Path) -> None:
        write(graph, folder)
        file = folder / "model.onnx"
        model = onnx.load(file)
        weight = next(one for one in model.graph.initializer if len(one.dims) == 2 and one.data_type == 1)
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
        onnx.save_model(model, file)

    monkeypatch.setattr(export_encoders, "write_graph", wrong)
    with pytest.raises(ExportError, match="the encoder graph does not compute what its checkpoint computes"):
        export_bundle(checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        ("llama", "t5", "reads text as its source, the target .* no source; choose a draft that reads what"),
        ("t5", "whisper", "reads sound as its source, the target .* text; choose a draft that reads what"),
    ],
)
def test_a_draft_with_another_kind_of_source_is_refused(tmp_path: Path, target: str, draft: str, reason: str) -> None:
    made = [
        tiny_checkpoint(kind, tmp_path / kind) if kind == "llama" else tiny_with_source(kind, tmp_path / kind)
        for kind in (target, draft)
    ]
    with pytest.raises(ExportError, match=reason):
        export_bundle(made[0], tmp_path / "bundle", made[1])


def test_a_bundle_whose_model_lacks_its_encoder_is_refused(t5: Path, tmp_path: Path) -> None:
    shutil.copytree(t5, tmp_path / "bundle")
    replace(Bundle.open(tmp_path / "bundle"), encoders={}).save()
    with pytest.raises(BundleError, match="0 encoders feed the target"):
        Bundle.open(tmp_path / "bundle")


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model whose makers force the end of texts that become as long as they may."""
    folder = tmp_path_factory.mktemp("forced")
    checkpoint = tiny_with_source("bart", folder / "checkpoint")
    settings = json.loads((checkpoint / "generation_config.json").read_text()) | {"forced_eos_token_id": END}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    return export_pair(checkpoint, folder / "bundle")


@pytest.mark.parametrize("beams", [1, 3])
def test_a_text_that_becomes_as_long_as_it_may_ends_as_its_makers_ask_for(forced: Pair, beams: int) -> None:
    sources, expected = example_sources("bart", 6), []
    write = writer("bart", forced.checkpoint, max_new_tokens=8, num_beams=beams, do_sample=False, early_stopping=False)
    for source in sources:
        said = write(source)[0, 1:].tolist()
        expected.append(said[: said.index(END) + 1])
    assert max(map(len, expected)) == 8, "a text is cut off, and its last token is the end"
    params = SamplingParams(max_new_tokens=8, num_beams=beams)
    with Decoder.open(forced.bundle) as decoder:
        for drafter, length in (("none", 0), *([("suffix", 4), ("lookup", 8)] if beams == 1 else [])):
            outputs = decoder.generate(sources=sources, params=params, drafter=drafter, draft_length=length)
            assert [list(output.token_ids) for output in outputs] == expected
            assert {output.finish_reason for output in outputs} == {"stop"}
        if beams == 1:
            shown = replace(params, ignore_eos=True)
            assert END not in [output.token_ids[-1] for output in decoder.generate(sources=sources, params=shown)]
            sampled = [replace(params, temperature=1.0, rule=rule, seed=1) for rule in ("coupled", "rejection")]
            for one in sampled:
                for output in decoder.generate(sources=sources, params=one, drafter="lookup", draft_length=4):
                    assert output.token_ids[-1] == END
                    assert END not in output.token_ids[:-1]
