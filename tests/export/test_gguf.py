"""GGUF files: what transformers reads of them is exported, with their tokenizer and chat template."""

from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer
from trt_spec.engines import ExportError
from trt_spec.export import export_bundle
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.checkpoints.vocabulary import read_vocabulary
from trt_spec.export.passes.blocks_in import blocks_in
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.gguf_model import TEMPLATE, write_gguf
from ..kit.k_quants import quantize


@pytest.mark.parametrize("kind", ["F32", "Q4_1", pytest.param("Q8_0", marks=pytest.mark.exhaustive)])
def test_its_greedy_text_is_that_of_the_dequantised_model(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    [target] = export_bundle(file, tmp_path / "bundle").models
    assert (target.entry.name, target.entry.architecture) == ("tiny", "llama")
    assert target.entry.check["worst_error"] < 2e-4
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    prompt = "abcdab cab"
    with Decoder.open(tmp_path / "bundle") as decoder:
        ids = torch.tensor([decoder.tokenizer.encode(prompt).ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        [output] = decoder.generate(prompt, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
        assert list(output.token_ids) == expected[0, ids.shape[1] :].tolist()
        assert decoder.bundle.tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("kind", "stored", "most"),
    [
        pytest.param("Q4_0", "int4", 1.3, marks=pytest.mark.exhaustive),
        pytest.param("Q4_1", "int4", 1.5, marks=pytest.mark.exhaustive),
        ("Q8_0", "int8", 1.3),
        ("Q4_K", "int4", 1.6),
        pytest.param("Q6_K", "int8", 1.6, marks=pytest.mark.exhaustive),
    ],
)
def test_its_blocks_are_kept_bit_for_bit_and_its_greedy_text_is_transformers(
    tmp_path: Path, kind: str, stored: str, most: float
) -> None:
    """In the engine that rounds no activations. The vocabulary of so tiny a model weighs, and is read in eight bits."""
    file = write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    [target] = export_bundle(file, tmp_path / "bundle", weights=Quantisation("auto")).models
    assert target.entry.weights == stored
    assert target.entry.dequantised == f"GGUF, {kind}: 16 matrices kept bit for bit"
    assert target.weight_bytes < most * target.checkpoint_bytes
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    with Decoder.open(tmp_path / "bundle", "torch") as decoder:
        for prompt in ("abcdab cab", "dac", "bbbb a"):
            ids = torch.tensor([decoder.tokenizer.encode(prompt).ids])
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
            [output] = decoder.generate(prompt, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
            assert list(output.token_ids) == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q4_K", "Q6_K"])
def test_blocks_are_found_in_the_matrix_that_they_have_become(kind: str) -> None:
    """Some blocks are of zeros, some have no number as large as their type allows."""
    numbers = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    numbers[0, :64], numbers[1] = 0.0, numbers[1] ** 3
    of_type = gguf.GGMLQuantizationType[kind]
    raw = quantize(numbers.numpy(), of_type)
    matrix = torch.from_numpy(gguf.dequantize(raw, of_type).copy())
    blocks = blocks_in(matrix.T)
    assert blocks is not None
    assert torch.equal(blocks.matrix(), matrix.T)
    assert blocks_in(matrix.T + 1e-3 * torch.randn(256, 48)) is None, "numbers that are in no blocks"


def test_it_is_parsed_once_and_draws_no_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary of fifty thousand takes seconds to parse, and transformers asks for it three times."""
    file = write_gguf(tmp_path / "tiny.gguf")
    parsed = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path: Path) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    export_bundle(file, tmp_path / "bundle", check=False)
    assert len(parsed) == 1
    assert "%|" not in capfd.readouterr().err
    write_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    export_bundle(file, tmp_path / "bundle", check=False)
    assert len(parsed) == 2, "another file of the same name is read anew"


def test_what_was_read_of_it_can_be_saved_as_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0))
    model = load_model(checkpoint, "float32")
    model.save_pretrained(tmp_path / "saved")
    assert open_checkpoint(tmp_path / "saved").quantised is None
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(torch.equal(weight, saved.state_dict()[name]) for name, weight in model.state_dict().items())


def test_its_tokenizer_is_transformers_and_its_folder_stands_for_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    read = read_vocabulary(open_checkpoint(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in ("abcd", "a b\n\u00e9 \U0001f600", "</s>x"):
        assert read.tokenizer.encode(text).ids == theirs(text).input_ids
        assert isinstance(read.tokenizer.decoder, decoders.ByteLevel)
    assert (read.bos_token_id, read.eos_token_ids) == (0, (1,))
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(ExportError, match=r"holds 2 GGUF files, the first is other\.gguf; name one"):
        open_checkpoint(tmp_path)


def test_what_is_none_or_cannot_be_read_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = tmp_path / "none.gguf"
    none.write_bytes(b"GGML and more")
    with pytest.raises(ExportError, match=r"none\.gguf is no GGUF file, whatever its name says"):
        open_checkpoint(none)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write_gguf(tmp_path / "tiny.gguf").read_bytes()[:2000])
    with pytest.raises(ExportError, match=r"cut\.gguf of checkpoint .* is refused by transformers"):
        open_checkpoint(cut)
    monkeypatch.setattr("trt_spec.export.checkpoints.checkpoint.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"needs gguf and accelerate to be read; pip install 'trt-spec\[export\]'"):
        open_checkpoint(tmp_path / "tiny.gguf")
