"""Commands that measure or certify a bundle with an encoder give each text a source."""

from pathlib import Path

import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.example_sources import PromptedDecoder, SourcedDecoder, example_source

from ..kit.bundles import export_pair
from ..kit.source_models import tiny_with_source

FEW = SamplingParams(max_new_tokens=8, min_tokens=8)


@pytest.fixture(scope="module", params=["t5", "whisper"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return export_pair(tiny_with_source(request.param, folder / "checkpoint"), folder / "bundle").bundle


def test_a_text_has_the_source_that_its_first_token_stands_for(bundle: Path) -> None:
    prompts = [[5, 9], [5, 7], [6, 9]]
    with SourcedDecoder.open(bundle) as decoder:
        found = decoder.generate(prompts, FEW)
        sources = [example_source(decoder.bundle, prompt[0]) for prompt in prompts]
    with Decoder.open(bundle) as decoder:
        expected = decoder.generate(prompts, FEW, sources=sources)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_a_prompt_is_the_source_where_the_encoder_reads_text(bundle: Path) -> None:
    with PromptedDecoder.open(bundle) as decoder:
        heard = decoder.bundle.encoder.contract.sound is not None
        found = decoder.generate(["abc", [9, 8, 7]], FEW)
        requests = [decoder.submit(prompt, FEW) for prompt in ("abc", [9, 8, 7])]
    assert all(request.prompt == decoder.bundle.tokenizer.start_ids for request in requests)
    if not heard:
        with Decoder.open(bundle) as decoder:
            expected = decoder.generate(sources=["abc", [9, 8, 7]], params=FEW)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_a_decoder_alone_is_asked_as_ever(llama) -> None:
    for kind in (SourcedDecoder, PromptedDecoder, Decoder):
        with kind.open(llama.bundle) as decoder:
            assert decoder.submit([5, 9], FEW).source is None


def test_bench_and_tune_measure_with_sources(run, bundle: Path) -> None:
    few = ("--max-new-tokens", 4, "--repeats", 1, "--draft-lengths", "0,2", "--drafter", "lookup")
    measured = run("bench", "--bundle", bundle, *few)
    assert measured.code == 0, measured.err
    assert "acceptance" in measured.out
    refused = run("bench", "--bundle", bundle, *few, "--compare", "hf")
    assert (refused.code, "runs models without an encoder" in refused.err) == (2, True)
    tuned = run("tune", bundle, "--draft-lengths", "0,2", "--batches", 1, "--repeats", 1, "--max-new-tokens", 16)
    assert tuned.code == 0, tuned.err
