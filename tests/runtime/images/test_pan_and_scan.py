"""Crops of long images are further images, as Gemma3Processor shows them, and a model says what transformers says."""

import base64
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from transformers.image_utils import load_image
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.image_processors import CROPS, reader_of, tokenizer, whole_processor, write_processor
from ...kit.images import image_file
from ...kit.seeing_models import Seeing, image, seeing

MOST = 16


def test_pixels_and_prompts_are_transformers_for_any_size_and_settings(tmp_path: Path):
    chance = Random(5)
    sides = [*range(1, 10), *range(10, 150, 3)]
    cases = [((6, 1), (1, 4, 1.2)), ((1, 7), (1, 6, 1.2))]  # the last crops are empty
    for _ in range(150):
        width = chance.choice(sides)
        size = (width, width if chance.random() < 0.2 else chance.choice(sides))
        cases.append((size, (chance.choice([1, 4, 9, 20, 30]), chance.randint(1, 6), chance.choice([1.0, 1.2, 2.5]))))
    counts = set()
    reader = reader_of(write_processor("gemma3-crops", tmp_path))
    whole = whole_processor("gemma3-crops", tmp_path)
    for size, crops in cases:
        own = dict(zip(CROPS, (True, *crops), strict=True))
        reader._family = replace(reader._family, crops=crops)  # type: ignore[type-var]
        content = image_file(*size)
        picture = reader.read(content)
        shown = load_image("data:image/png;base64," + base64.b64encode(content).decode())
        prompt = f"see{reader.placeholder}\nthere"
        given = whole(images=[shown], text=prompt, add_special_tokens=False, images_kwargs=own, return_tensors="np")
        np.testing.assert_array_equal(picture.inputs["pixels"], given["pixel_values"])
        ids = tokenizer().encode(reader.surrounded(prompt, [picture])).ids
        assert reader.expand(ids, [picture]) == given["input_ids"][0].tolist()
        counts.add(len(picture.inputs["pixels"]))
    assert counts == {1, 2, 3, 4, 5, 6, 7}


def test_what_files_leave_open_is_as_the_processor_has_it(tmp_path: Path):
    """Published files have null for all settings of crops."""
    left_open = dict.fromkeys(CROPS) | {"do_pan_and_scan": True}
    reader = reader_of(write_processor("gemma3-crops", tmp_path, **left_open))
    whole = whole_processor("gemma3-crops", tmp_path)
    for size in ((1100, 300), (255, 1000), (600, 520), (520, 700)):
        content = image_file(*size)
        shown = load_image("data:image/png;base64," + base64.b64encode(content).decode())
        given = whole(images=[shown], text=reader.placeholder, images_kwargs={"do_pan_and_scan": True})
        np.testing.assert_array_equal(reader.read(content).inputs["pixels"], np.stack(given["pixel_values"]))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = tmp_path_factory.mktemp("crops")
    whole = seeing("gemma3", folder / "whole")
    write_processor("gemma3-crops", folder / "whole")
    report = export_bundle(folder / "whole", folder / "bundle", folder / "whole", images=True)
    return Seeing("gemma3", whole, folder / "whole", folder / "bundle", report)


@pytest.mark.exhaustive
def test_a_model_says_of_crops_what_transformers_says(gemma: Seeing):
    prompts = gemma.prompts()
    prompts.append((f"{'z' * 240}{gemma.placeholder} and so on", [image(150, 30)]))  # a call would end within a crop
    pictures = [picture for _, own in prompts for picture in gemma.read(own)]
    assert {len(one.inputs["pixels"]) for one in pictures} == {1, 3, 5}
    expected = [gemma.said(*prompt, MOST) for prompt in prompts]
    params = SamplingParams(max_new_tokens=MOST, prompt_logprobs=0)
    with Decoder.open(gemma.bundle, prefix_bytes=1 << 24) as decoder:
        texts, images = [text for text, _ in prompts], [own for _, own in prompts]
        for asked in (params, replace(params, prompt_logprobs=None)):
            outputs = decoder.generate(texts, asked, images=images, drafter="model", draft_length=3)
            assert [list(output.token_ids) for output in outputs] == expected
            if asked is not params:
                assert outputs[3].usage.cached_tokens > 0
                continue
            for output, (text, own) in zip(outputs, prompts, strict=True):
                ids, log_probs = gemma.ids(text, gemma.read(own)), gemma.log_probs(text, own)
                found = [one.logprob for one in (output.prompt_logprobs or ())[1:] if one]
                wanted = [float(log_probs[place, token]) for place, token in enumerate(ids[1:])]
                assert found == pytest.approx(wanted, abs=1e-4)
