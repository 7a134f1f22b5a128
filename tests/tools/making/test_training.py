"""Drafts learn from their target, and say by held-out measures what it brought."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trt_spec.engines import ExportError, PairError, RequestError
from trt_spec.export import export_bundle
from trt_spec.tools.making.cut_down import cut_down, evenly
from trt_spec.tools.making.distil_draft import distil, sample
from trt_spec.tools.making.training import Windows, distillation_loss, what_others_miss

from ...kit.gguf_model import write_gguf
from ...kit.models import tiny_gemma2, tiny_gpt2, tiny_llama

SMALL = {"samples": 20, "length": 24, "steps": 40, "rate": 5e-3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("training") / "target", initializer_range=0.15)


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_distilled_draft_agrees_more_often_on_what_was_held_out(target: Path, tmp_path: Path, reverse: bool):
    found = distil(str(target), tmp_path / "draft", ["abc", "def f("], layers=1, hidden=32, reverse=reverse, **SMALL)
    assert found["after"][1.0] > found["before"][1.0] + 0.02
    assert set(found["before"]) == {0.0, 1.0}


def test_a_draft_after_another_learns_most_of_what_that_one_misses(target: Path, tmp_path: Path):
    prompts, settings = ["abc", "def f("], {"layers": 1, "hidden": 32, **SMALL, "steps": 150}
    alone = distil(str(target), tmp_path / "first", prompts, **settings)
    found = distil(str(target), tmp_path / "second", prompts, **settings, seed=1, after=[str(tmp_path / "first")])
    assert "of_what_others_miss" not in alone
    gained = found["of_what_others_miss"]
    assert gained["after"][1.0] > gained["before"][1.0] + 0.02
    assert found["after"][1.0] < alone["after"][1.0], "at the cost of what the first knows already"


def test_a_target_that_is_cut_down_learns_and_keeps_the_ends_of_the_target(tmp_path: Path):
    target = tiny_llama(tmp_path / "target", num_hidden_layers=3, initializer_range=0.15)
    found = distil(str(target), tmp_path / "draft", ["abc", "def f("], cut=1, **SMALL)
    assert found["after"][1.0] > found["before"][1.0] + 0.02
    theirs, ours = (load_file(path / "model.safetensors") for path in (target, tmp_path / "draft"))
    ends = "model.embed_tokens.weight"
    assert torch.equal(ours[ends], theirs[ends].bfloat16())
    assert not torch.equal(ours["model.norm.weight"], theirs["model.norm.weight"].bfloat16()), "the rest has learned"
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_gemma2])
def test_a_model_cut_down_is_its_first_and_last_layers_and_those_evenly_between(make: Any, tmp_path: Path):
    """As transformers builds it from the configuration and the weights that are kept."""
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path / "target", num_hidden_layers=4), dtype=torch.float32)
    cut = cut_down(model.eval(), 2)
    cut.save_pretrained(tmp_path / "cut")
    built = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", dtype=torch.float32).eval()
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(built(tokens).logits, cut(tokens).logits)
    assert model.config.num_hidden_layers == 4, "the model itself stays whole"
    names = ("model.layers.{}.", "transformer.h.{}.")
    weights = model.state_dict()
    for place, kept in enumerate((0, 3)):
        for name, weight in cut.state_dict().items():
            if (begin := next((one for one in names if name.startswith(one.format(place))), None)) is not None:
                assert torch.equal(weight, weights[begin.format(kept) + name.removeprefix(begin.format(place))])
    assert (evenly(1, 5), evenly(3, 5), evenly(3, 30)) == ([0], [0, 2, 4], [0, 14, 29])


def test_minutes_end_the_writing_and_the_training(target: Path, tmp_path: Path):
    """However many samples and steps are asked for: here the minutes are over before either begins."""
    endless = SMALL | {"samples": 10_000, "steps": 10**6}
    found = distil(str(target), tmp_path / "draft", ["abc"], layers=1, hidden=32, minutes=1e-9, **endless)
    assert (found["continuations"], found["steps"]) == (16, 1)
    assert distil(str(target), tmp_path / "other", ["abc"], layers=1, hidden=32, **SMALL)["steps"] == SMALL["steps"]


def test_prompts_of_unlike_lengths_are_continued_together_as_each_alone(target: Path):
    """The target's likeliest tokens, which no draw of another row moves."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.get_output_embeddings().weight.data *= 1e4  # all probability is on one token
    prompts = [[5, 6, 7, 8, 9], [10], [11, 12]]
    together = sample(model, prompts, 3, 8, "cpu")
    alone = [sample(model, [prompt], 1, 8, "cpu")[0] for prompt in prompts]
    assert [row.tolist() for row in together] == [row.tolist() for row in alone]


def test_a_draft_of_a_gguf_file_has_its_tokenizer(tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf")
    distil(str(file), tmp_path / "draft", ["abcd"], cut=1, **SMALL | {"steps": 2})
    models = export_bundle(file, tmp_path / "bundle", draft=tmp_path / "draft").models
    assert [model.role for model in models] == ["target", "draft"]


def test_what_earlier_drafts_leave_is_what_the_next_is_tested_against():
    """By hand: where both fail, what is left of p, and how often that is."""
    p, first, second = (
        torch.tensor([[distribution]]) for distribution in ([0.5, 0.3, 0.2], [0.8, 0.1, 0.1], [0.0, 0.0, 1.0])
    )
    left, chance = what_others_miss(p, [first])
    assert left[0, 0].tolist() == pytest.approx([0, 2 / 3, 1 / 3])
    assert chance.item() == pytest.approx(0.3)
    left, chance = what_others_miss(p, [first, second])
    assert left[0, 0].tolist() == pytest.approx([0, 1, 0])
    assert chance.item() == pytest.approx(0.3 * 2 / 3)
    left, chance = what_others_miss(p, [p, first])
    assert left[0, 0].isfinite().all(), "nothing is left of a draft that is the target"
    assert chance.item() == 0


@pytest.mark.exhaustive
def test_a_distilled_draft_is_exported_beside_its_target(target: Path, tmp_path: Path):
    distil(str(target), tmp_path / "draft", ["abc", "def f("], layers=1, hidden=32, **SMALL | {"steps": 2})
    models = export_bundle(target, tmp_path / "bundle", draft=tmp_path / "draft").models
    assert [model.role for model in models] == ["target", "draft"], "the two are a pair"


def test_a_draft_is_distilled_further_from_a_checkpoint(target: Path, tmp_path: Path):
    given = tiny_llama(tmp_path / "given", num_hidden_layers=1, initializer_range=0.15, seed=3)
    distil(str(target), tmp_path / "draft", ["abc"], draft=str(given), **SMALL | {"steps": 2})
    before, after = (load_file(path / "model.safetensors") for path in (given, tmp_path / "draft"))
    assert {name: weight.shape for name, weight in before.items()} == {name: w.shape for name, w in after.items()}
    assert any(not torch.equal(before[name].bfloat16(), after[name]) for name in before)


def test_a_draft_with_another_tokenizer_is_refused_and_nothing_is_written(target: Path, tmp_path: Path):
    for vocab, said in ((400, "the tokenizers of target and draft differ"), (63, "lacks 1 tokens of the target, and ")):
        other = tiny_llama(tmp_path / f"other-{vocab}", vocab=vocab)
        with pytest.raises(PairError, match=said):
            distil(str(target), tmp_path / "draft", ["abc"], draft=str(other), **SMALL)
    assert not (tmp_path / "draft").exists()
    with pytest.raises(ExportError, match="is neither a directory here nor a model's name"):
        distil(str(tmp_path / "missing"), tmp_path / "draft", ["abc"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"samples": 1}, "--samples is 1, expected at least 2"),
        ({"length": 1}, "--length is 1, expected at least 2"),
        ({"layers": 0}, "--layers is 0, expected at least 1"),
        ({"batch": 0}, "--batch is 0, expected at least 1"),
        ({"minutes": 0}, "--minutes is 0, expected more than 0"),
        ({"minutes": math.nan}, "--minutes is nan, expected more than 0"),
        ({"cut": 2}, "--cut is 2, expected 1 to 1: the target has 2 layers"),
        ({"cut": 1, "draft": "x"}, "--draft and --cut both say what to start from; leave one out"),
        ({"steps": 0}, "--steps is 0, expected at least 1"),
        ({"hidden": 100}, "--hidden is 100, expected a multiple of 64, or an even number below"),
        ({"rate": math.nan}, "--rate is nan, expected a number between 0 and 1"),
        ({"after": ["x"], "reverse": True}, "--reverse is for a draft alone; leave it out, or --after"),
        ({"device": "warp"}, "--device is 'warp', which torch cannot use here"),
        ({"prompts": ["", ""]}, "the longest prompt has 0 tokens, expected 1 to "),
        ({"length": 10_000}, "the longest prompt has 3 tokens, expected 1 to -"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_and_nothing_is_written(
    target: Path, tmp_path: Path, settings: dict[str, Any], said: str
):
    with pytest.raises(RequestError, match=re.escape(said)):
        distil(str(target), tmp_path / "draft", **{"prompts": ["abc"]} | SMALL | settings)
    assert not list(tmp_path.iterdir())


def test_both_divergences_vanish_for_the_same_model_and_only_then(target: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    other = AutoModelForCausalLM.from_config(model.config).eval()
    tokens = torch.arange(40).view(2, 20)
    for reverse in (False, True):
        assert float(distillation_loss(model, model, reverse)(tokens)) == pytest.approx(0, abs=1e-6)
        assert float(distillation_loss(other, model, reverse)(tokens)) > 0.01


def test_windows_are_drawn_by_their_seed_and_measured_ones_do_not_overlap():
    stream = torch.arange(100)
    first, second = (Windows(stream, 9, 4, seed=1) for _ in range(2))
    assert torch.equal(first.draw(), second.draw())
    assert not torch.equal(first.draw(), Windows(stream, 9, 4, seed=2).draw())
    assert torch.equal(first.fixed(5), stream[:50].view(5, 10))
    with pytest.raises(RequestError, match="the text has 100 tokens, expected more than 100"):
        Windows(stream, 100, 1, 0)
