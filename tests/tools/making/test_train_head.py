"""A head learns what its target says, goes on where it was cut off, and is written as others read it."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache
from trt_spec.engines import ExportError, RequestError
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
from trt_spec.export.kinds import open_head, open_look_aheads
from trt_spec.tools.interruption import Terminated
from trt_spec.tools.making import learning
from trt_spec.tools.making import train_head as tool
from trt_spec.tools.making.heads import LESSONS
from trt_spec.tools.making.heads import spoken as spoken_rows
from trt_spec.tools.making.heads.eagle3 import Eagle3Lesson, known
from trt_spec.tools.making.heads.lesson import FIRST, Lesson
from trt_spec.tools.making.heads.measures import bigram, by_place
from trt_spec.tools.making.heads.spoken import Rows, Spoken
from trt_spec.tools.making.heads.teacher import Teacher
from trt_spec.tools.making.train_head import train_head
from trt_spec.tools.training_settings import KINDS, LEAST, HeadSettings

from ...kit.families import tiny_checkpoint
from ...kit.models import tiny_gemma2, tiny_gpt2, tiny_llama

SLOTTED = ("eagle3", "mtp")  # kinds that go step by step
PROMPTS = ["abc", "def f(", "x = 1"]
SMALL = {"samples": 24, "length": 32, "steps": 40, "rate": 1e-2, "draft_vocab": 48, "mlp": 32}
PARALLEL = ("medusa", "blockwise")


def small(kind: str, **changed: Any) -> dict[str, Any]:
    """The settings that this kind reads."""
    unread = set(LEAST) - set(KINDS[kind])
    return {name: value for name, value in SMALL.items() if name not in unread} | changed


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("heads") / "target", num_hidden_layers=8))


@pytest.fixture(autouse=True)
def _few_rows_at_once(monkeypatch: pytest.MonkeyPatch):
    for module in (tool, spoken_rows):
        monkeypatch.setattr(module, "TOGETHER", 8)


def settings_of(target: str, kind: str = "eagle3", **changed: Any) -> HeadSettings:
    own = {name: value for name, value in small(kind).items() if name != "steps"}
    return HeadSettings(kind, target, "", **own | changed)


def taught(target: str, folder: Path, kind: str = "eagle3", **changed: Any) -> tuple[Any, Spoken]:
    """A lesson, and what the target has said."""
    lesson: Lesson[Any] = LESSONS[kind](Teacher(open_checkpoint(target), "cpu"))
    spoken = Spoken(folder, settings_of(target, kind, **changed), lesson.layers, lesson.teacher)
    spoken.write(lesson.teacher, [[5, 6, 7], [8, 9]], lambda: True)
    return lesson, spoken


def test_a_target_that_never_attends_teaches_what_it_says_of_a_whole_text(tmp_path: Path):
    target = str(tiny_checkpoint("mamba2", tmp_path / "target", num_hidden_layers=6, initializer_range=0.3))
    lesson, spoken = taught(target, tmp_path / "spoken")
    rows = spoken.rows([0, 9])
    whole = lesson.teacher.read(rows.tokens, lesson.layers)
    said = torch.cat([rows.hidden, rows.last[:, :, None]], 2)
    assert torch.allclose(said, whole, rtol=1e-2, atol=1e-2 * float(whole.std())), "kept in half precision"
    head = lesson.begin(spoken, settings_of(target))
    assert head.config.num_attention_heads == 1
    assert head.config.head_dim == 64


@pytest.mark.parametrize("kind", [kind for kind in LESSONS if kind != "pass"])
def test_a_trained_head_is_accepted_more_often_on_what_was_held_out(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr(spoken_rows, "TOGETHER", 64)  # sooner
    found = train_head(kind, target, tmp_path / "head", PROMPTS, **small(kind, steps=150, samples=128))
    for place in range(4):
        assert found["after"]["overlap"][place] > found["before"]["overlap"][place] + 0.01
    assert found["after"]["overlap"][0] > found["bigram"]["overlap"]
    assert [one["step"] for one in found["quarters"]] == [38, 75, 113]
    assert (found["rows"], found["steps"]) == (128, 150)
    assert [file.name for file in tmp_path.iterdir()] == ["head"], "what it kept while it learned is gone"


@pytest.mark.parametrize(("rank", "least"), [(None, 0.01), (8, 0.04)])
def test_trained_look_aheads_are_accepted_more_often_on_what_was_held_out(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None, least: float
):
    """Of all places together: a target of random weights says nearly the same after any embedding."""
    monkeypatch.setattr(spoken_rows, "TOGETHER", 64)  # sooner
    found = train_head("pass", target, tmp_path / "head", PROMPTS, **small("pass", steps=150, samples=128, rank=rank))
    assert sum(found["after"]["overlap"]) > sum(found["before"]["overlap"]) + least
    assert [file.name for file in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize(
    ("kind", "place", "call", "error"),
    [
        ("eagle3", "spoken", 2, KeyboardInterrupt),
        ("eagle3", "step", 1, KeyboardInterrupt),
        ("eagle3", "step", 13, Terminated),
        ("eagle3", "step", 25, KeyboardInterrupt),
        ("blockwise", "step", 13, KeyboardInterrupt),
        ("pass", "step", 13, KeyboardInterrupt),
    ],
)
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    place: str,
    call: int,
    error: type[BaseException],
):
    whole = train_head(kind, target, tmp_path / "whole", PROMPTS, **small(kind))
    owner, name = {"spoken": (Spoken, "_continue"), "step": (learning, "_step")}[place]
    calls, real = 0, getattr(owner, name)

    def cut_off(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, cut_off)
        with pytest.raises(error):
            train_head(kind, target, tmp_path / "again", PROMPTS, **small(kind))
        assert not (tmp_path / "again").exists()
        calls = call
        again = train_head(kind, target, tmp_path / "again", PROMPTS, **small(kind))
    rest = calls - call
    assert rest == {"spoken": 3 - 1, "step": SMALL["steps"] - call + 1}[place], "what was done is not done again"
    assert {**again, "minutes": 0} == {**whole, "minutes": 0}
    first, second = (tmp_path / one / "model.safetensors" for one in ("whole", "again"))
    assert first.read_bytes() == second.read_bytes()


def test_a_run_that_was_killed_goes_on_from_what_it_saved_last(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is saved as it dies: it had saved after each fifth step."""
    train_head("eagle3", target, tmp_path / "whole", PROMPTS, **SMALL)
    real_save, real_step, last = tool.save_state, learning._step, []

    def save_state(folder: Path, settings: HeadSettings, now: Any, *parts: Any) -> None:
        if now.step % 5 == 0 and not (last and last[-1] == "dead"):
            real_save(folder, settings, now, *parts)
            last.append(now.step)

    def step(*arguments: Any) -> float:
        if arguments[-2] == 18:
            last.append("dead")
            raise KeyboardInterrupt
        return real_step(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(learning, "SAVED", 0.0)
        patched.setattr(tool, "save_state", save_state)
        patched.setattr(learning, "_step", step)
        with pytest.raises(KeyboardInterrupt):
            train_head("eagle3", target, tmp_path / "again", PROMPTS, **SMALL)
    assert last[-2:] == [15, "dead"]
    train_head("eagle3", target, tmp_path / "again", PROMPTS, **SMALL)
    first, second = (tmp_path / one / "model.safetensors" for one in ("whole", "again"))
    assert first.read_bytes() == second.read_bytes()


def test_a_head_is_written_as_speculators_reads_it(target: str, tmp_path: Path):
    found = train_head("eagle3", target, tmp_path / "head", PROMPTS, **SMALL | {"steps": 2})
    weights = load_file(tmp_path / "head" / "model.safetensors")
    layer, attention = "layers.0.", "layers.0.self_attn."
    shapes = {
        "fc.weight": (32, 96),
        f"{attention}q_proj.weight": (64, 64),
        f"{attention}k_proj.weight": (32, 64),
        f"{attention}v_proj.weight": (32, 64),
        f"{attention}o_proj.weight": (32, 64),
        f"{layer}mlp.gate_proj.weight": (32, 32),
        f"{layer}mlp.up_proj.weight": (32, 32),
        f"{layer}mlp.down_proj.weight": (32, 32),
        f"{layer}hidden_norm.weight": (32,),
        f"{layer}input_layernorm.weight": (32,),
        f"{layer}post_attention_layernorm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (48, 32),
        "d2t": (48,),
        "t2d": (64,),
    }
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    types = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(weight.dtype == types.get(name, torch.float16) for name, weight in weights.items())
    ids = torch.arange(48) + weights["d2t"]
    assert torch.equal(ids, weights["t2d"].nonzero()[:, 0])
    assert found["parameters"] == sum(weight.numel() for name, weight in weights.items() if name not in types)

    config = json.loads((tmp_path / "head" / "config.json").read_text())
    wanted = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 48,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": False,
        "norm_output": False,
    }
    assert {name: config[name] for name in wanted} == wanted
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, 64)
    assert (layer["bos_token_id"], layer["eos_token_id"]) == (0, 1), "as the target's"
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert sorted(file.name for file in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    assert found["bytes"] == sum(file.stat().st_size for file in (tmp_path / "head").iterdir())


def test_a_layer_of_mtp_is_written_as_the_export_reads_it(target: str, tmp_path: Path):
    train_head("mtp", target, tmp_path / "head", PROMPTS, **small("mtp", steps=20))
    opened, lesson = open_head(tmp_path / "head"), LESSONS["mtp"](Teacher(open_checkpoint(target), "cpu"))
    assert opened is not None
    contract, text = lesson.teacher.checkpoint.shape.contract(256, "float32"), torch.arange(2, 40)
    loaded = opened.kind.load(opened, lesson.teacher.model, contract, Sample(text.tolist(), 64))
    hidden = lesson.teacher.read(text[None], ())
    rows = spoken_rows.Rows(text[None], hidden[:, :, :0], hidden[:, :, 0])
    found = []
    with torch.no_grad():
        distribution = lesson.teacher.logits(rows.last).softmax(-1)[0]
        for whose, logits in lesson.distributions(loaded.module, rows, 2):
            whose = whose[: len(text) - 3]  # the slots of which every step has a token
            found.append(
                float(torch.minimum(distribution[whose], logits[0, : len(whose)].softmax(-1)).sum() / len(whose))
            )
    [readings] = loaded.readings.values()
    assert readings == pytest.approx(found, abs=2e-3)


@pytest.mark.parametrize("kind", PARALLEL)
def test_parallel_heads_are_written_as_the_export_reads_them(target: str, tmp_path: Path, kind: str):
    found = train_head(kind, target, tmp_path / "head", PROMPTS, **small(kind, steps=2))
    weights = load_file(tmp_path / "head" / "model.safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for place in range(4):
        parts = ("{}.0.linear", "{}.1.linear") if kind == "medusa" else ("blocks.{}.up", "blocks.{}.down")
        for part in parts:
            shapes |= {f"{part.format(place)}.weight": (32, 32), f"{part.format(place)}.bias": (32,)}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes, "the projection is the target's"
    assert all(weight.dtype == torch.float16 for weight in weights.values())
    assert found["parameters"] == sum(weight.numel() for weight in weights.values())
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    own = {
        "medusa": {"medusa_num_heads": 4, "medusa_num_layers": 2, "medusa_fc_bias": True, "original_lm_head": True},
        "blockwise": {"num_heads": 4, "blockwise_inner_size": 32},
    }
    assert config == {"base_model_name_or_path": "target", "dtype": "float16", **own[kind]}
    assert open_head(tmp_path / "head").kind.name == kind
    assert sorted(file.name for file in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("kind", PARALLEL)
def test_parallel_heads_that_are_exported_overlap_with_their_target_as_the_lesson_says(
    target: str, tmp_path: Path, kind: str
):
    """Place by place, on one text: the export's own reading of a file against what was learned."""
    lesson, spoken = taught(target, tmp_path / "kept", kind)
    head = lesson.begin(spoken, settings_of(target, kind))
    _shake(head)
    lesson.write(head, tmp_path)
    opened, text = open_head(tmp_path), spoken.tokens(spoken.held_out).flatten()[:200]
    contract = open_checkpoint(target).shape.contract(256, "float32")
    loaded = opened.kind.load(opened, lesson.teacher.model, contract, Sample(text.tolist(), 64))
    with torch.no_grad():
        rows = Rows(text[None], torch.empty(0), lesson.teacher.read(text[None], ())[:, :, -1])
        distributions, expected = lesson.teacher.logits(rows.last).softmax(-1), []
        for whose, logits in lesson.distributions(head, rows, 4):
            overlap = torch.minimum(distributions[:, whose], logits.softmax(-1)).sum(-1)
            expected.append(float(overlap[:, : len(text) - 4].mean()))
    assert loaded.readings["4 heads"] == pytest.approx(expected, abs=2e-4)  # written in float16
    assert len({round(share, 3) for share in expected}) == 4, "one place could pass for another"


@pytest.mark.parametrize("rank", [None, 2])
def test_look_aheads_are_written_as_the_export_reads_them_and_say_there_what_they_say_here(
    target: str, tmp_path: Path, rank: int | None
):
    lesson, spoken = taught(target, tmp_path / "kept", "pass")
    torch.manual_seed(0)
    head, rows = lesson.begin(spoken, settings_of(target, "pass", heads=3, rank=rank)), spoken.rows([1])
    assert len(head.up) == (0 if rank is None else 4 * 8), "of each layer the output of attention, and all of the MLP"
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(weight.half())
        before = list(lesson.distributions(head, rows, 4))
        for weight in head.up:
            weight.normal_(std=0.3).copy_(weight.half())
        said = list(lesson.distributions(head, rows, 4))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(said, before, strict=True)) == (rank is None)
    lesson.write(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "model_type": "pass", "base_model_name_or_path": "target", "num_look_aheads": 3, "dtype": "float16",
    }  # fmt: skip
    opened, model = open_look_aheads(tmp_path), lesson.teacher.model
    assert opened is not None
    assert opened.join(model, 64) == 3
    assert [whose.tolist() for whose, _ in said] == [list(range(place, 32)) for place in (1, 2, 3)]
    for slot in (0, 5, 28):
        with torch.no_grad():
            logits = model(torch.tensor([[*rows.tokens[0, : slot + 1], 64, 65, 66]])).logits[0, -3:]
        for place, (_, found) in enumerate(said):
            torch.testing.assert_close(found[0, slot], logits[place], atol=1e-4, rtol=1e-4)


def test_look_aheads_are_not_taught_where_the_export_would_read_others(target: str, tmp_path: Path):
    class Scaled(torch.nn.Embedding):
        pass

    lesson, spoken = taught(target, tmp_path, "pass")
    with pytest.raises(RequestError, match="--heads is 17, expected at most 16 look-aheads"):
        lesson.begin(spoken, settings_of(target, "pass", heads=17))
    lesson.teacher.model.get_input_embeddings().__class__ = Scaled
    with pytest.raises(RequestError, match=r"changes what it reads of its embedding \(Scaled\), for which no look-"):
        lesson.begin(spoken, settings_of(target, "pass"))
    with pytest.raises(RequestError, match=r"changes what it reads of its embedding \(Gemma2TextScaled"):
        train_head("pass", str(tiny_gemma2(tmp_path / "gemma2")), tmp_path / "head", PROMPTS, **small("pass"))
    lesson, checkpoint = LESSONS["pass"](Teacher(open_checkpoint(target), "cpu")), open_checkpoint(target)
    lesson.teacher.checkpoint = replace(checkpoint, shape=replace(checkpoint.shape, window=8))
    with pytest.raises(RequestError, match=r"sees windows of 8 tokens, .*; lower --length from 32 to that"):
        lesson.begin(spoken, settings_of(target, "pass"))


def _shake(head: torch.nn.Module) -> None:
    """Let it say something of its own."""
    torch.manual_seed(1)
    for weight in head.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)


def test_medusas_heads_begin_as_the_targets_distribution_of_the_next_token(target: str, tmp_path: Path):
    lesson, spoken = taught(target, tmp_path, "medusa")
    head, rows = lesson.begin(spoken, settings_of(target, "medusa", heads=3)), spoken.rows([1])
    said = list(lesson.distributions(head, rows, 4))
    assert [whose.tolist() for whose, _ in said] == [list(range(place, 32)) for place in (1, 2, 3)]
    for whose, logits in said:
        torch.testing.assert_close(logits, lesson.teacher.logits(rows.last)[:, : len(whose)])
    assert len(by_place(lesson, head, spoken)["overlap"]) == 3, "there are no more places"


@torch.no_grad()
def test_blockwise_heads_begin_with_what_a_linear_map_foretells(target: str, tmp_path: Path):
    """By least squares; where the width of the MLP is odd one unit has no partner."""
    lesson, spoken = taught(target, tmp_path, "blockwise", samples=64)
    head = lesson.begin(spoken, settings_of(target, "blockwise", mlp=65))
    last = spoken.rows(spoken.learned).last
    for place, block in enumerate(head.blocks):
        read, wanted = last[:, : -place - 1].flatten(0, 1), last[:, place + 1 :].flatten(0, 1)
        known_of = torch.cat([read, torch.ones(len(read), 1)], 1)
        foretold = 1.3 * known_of @ torch.linalg.lstsq(known_of, wanted).solution
        torch.testing.assert_close(block(read), foretold, rtol=0, atol=0.05 * float(foretold.std()))  # ridge


def test_a_head_that_knows_all_tokens_has_no_map_of_them(target: str, tmp_path: Path):
    train_head("eagle3", target, tmp_path / "head", PROMPTS, **SMALL | {"steps": 1, "draft_vocab": 1000})
    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert not {"d2t", "t2d"} & set(weights)
    assert weights["lm_head.weight"].shape == (64, 32)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["draft_vocab_size"] == 64


def test_a_head_knows_the_most_frequent_tokens(target: str, tmp_path: Path):
    lesson, spoken = taught(target, tmp_path, draft_vocab=16)
    ids = known(lesson.begin(spoken, settings_of(target, draft_vocab=16))).tolist()
    counts = torch.bincount(spoken.tokens(spoken.learned).flatten(), minlength=64)
    assert ids == sorted(ids)
    assert sum(counts[ids]) == sum(counts.sort(descending=True)[0][:16])


def test_what_the_target_said_is_kept_with_its_hidden_states_and_drawn_by_its_distribution(target: str, tmp_path: Path):
    """Each row is read again at once: hidden states are the same up to bfloat16. A target that is sure is followed."""
    lesson, spoken = taught(target, tmp_path / "kept")
    rows = spoken.rows(range(24))
    again = lesson.teacher.read(rows.tokens, lesson.layers)
    torch.testing.assert_close(torch.cat([rows.hidden, rows.last[:, :, None]], 2), again, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(
        lesson.teacher.logits(again[:, :, -1]), lesson.teacher.model(rows.tokens).logits, rtol=1e-4, atol=1e-4
    )
    assert rows.tokens[:, :2].unique(dim=0).tolist() == [[5, 6], [8, 9]], "cut to the shorter of a batch"
    assert len(rows.tokens.unique(dim=0)) == 24, "each row has noise of its own"
    sure = Teacher(open_checkpoint(target), "cpu")
    sure.model.get_output_embeddings().weight.data *= 1e4  # all probability is on one token
    other = Spoken(tmp_path / "sure", settings_of(target), lesson.layers, sure)
    other.write(sure, [[5, 6, 7]], lambda: True)
    text = other.rows(range(24)).tokens
    assert torch.equal(text[:, 3:], sure.model(text).logits.argmax(-1)[:, 2:-1])


def test_held_out_rows_are_not_learned_from(target: str, tmp_path: Path):
    _, spoken = taught(target, tmp_path)
    assert spoken.held_out.tolist() == [0, 10, 20]
    assert not set(spoken.held_out.tolist()) & set(spoken.learned.tolist())
    assert len(spoken.learned) == 21


def test_acceptance_by_place_is_that_of_the_tokens_in_their_places(target: str, tmp_path: Path):
    """A head that says the target's own distribution is accepted always, and one that says it a token late is not."""
    lesson, spoken = taught(target, tmp_path)

    class Listed(Eagle3Lesson):
        late = 0

        def distributions(self, head: Any, rows: Any, places: int) -> Any:
            logits, width = self.teacher.logits(rows.last), rows.tokens.shape[1]
            for place in range(places):
                whose = torch.arange(place + 1, width)
                yield whose, logits[:, whose - self.late]

    told = Listed(lesson.teacher)
    assert by_place(told, torch.nn.Identity(), spoken) == {"overlap": [1.0] * 4, "greedy": [1.0] * 4}
    told.late = 1
    assert max(by_place(told, torch.nn.Identity(), spoken)["overlap"]) < 0.9


def test_what_a_head_proposes_by_place_is_what_it_proposes_in_a_line(target: str, tmp_path: Path):
    """Decoded step by step after a text: real features as far as the target has read, then the head's own."""
    lesson, spoken = taught(target, tmp_path)
    head = lesson.begin(spoken, settings_of(target)).eval()
    rows = spoken.rows([1])
    committed = 20  # tokens; the target has read all but the last
    with torch.no_grad():
        found = dict(enumerate(lesson.distributions(head, rows, 4)))
        features = head.encoder(rows.hidden.unbind(2))
        cache, places = DynamicCache(), torch.arange(committed)[None]
        tokens = rows.tokens[:, :committed]
        given = torch.cat([features[:, :1], features[:, : committed - 1]], 1)  # nothing sees place 0
        for step in range(4):
            hidden, normed = head(tokens, given, places, cache)
            whose, logits = found[step]
            last = committed - 1 + step  # the token after which it proposes
            place = whose.tolist().index(last)
            torch.testing.assert_close(logits[:, place], head.logits(normed[:, -1]), rtol=1e-4, atol=1e-4)
            tokens, given, places = rows.tokens[:, last + 1, None], hidden[:, -1:], places[:, -1:] + 1


def test_the_bigram_is_counted_in_what_was_learned(target: str, tmp_path: Path):
    """By hand, token by token."""
    lesson, spoken = taught(target, tmp_path)
    after: dict[int, Tensor] = {}
    for row in spoken.tokens(spoken.learned).tolist():
        for one, following in pairwise(row):
            after.setdefault(one, torch.zeros(64))[following] += 1
    rows = spoken.rows(spoken.held_out)
    distributions, overlap = lesson.teacher.logits(rows.last).softmax(-1), []
    for row, distribution in zip(rows.tokens.tolist(), distributions, strict=True):
        for one, p in zip(row[:-1], distribution, strict=False):
            counts = after.get(one)
            overlap.append(0.0 if counts is None else float(torch.minimum(p, counts / counts.sum()).sum()))
    assert bigram(lesson, spoken)["overlap"] == pytest.approx(sum(overlap) / len(overlap), abs=1e-4)


@pytest.mark.parametrize("kind", LESSONS)
def test_the_loss_vanishes_with_the_distance_to_the_distribution_it_is_taught(target: str, tmp_path: Path, kind: str):
    """To begin with it is divergence, of a first step alone where there are steps; at the end what is not accepted.

    Later steps are taken on a third of the slots, places that are said at once all on a quarter.
    """
    steps = kind in SLOTTED
    changed = {"draft_vocab": 64} if kind == "eagle3" else {}
    lesson, spoken = taught(target, tmp_path, kind, **changed)
    head = lesson.begin(spoken, settings_of(target, kind, **changed))
    rows, draw = spoken.rows(spoken.learned[:2]), torch.Generator()
    begin = int(torch.randint(3 if steps else 4, (1,), generator=draw.manual_seed(3)))
    first, later = (slice(None), slice(begin, 32 - 4, 3)) if steps else 2 * (slice(begin, None, 4),)
    apart, missed = [], []
    with torch.no_grad():
        distributions = lesson.teacher.logits(rows.last).softmax(-1)
        for place, (whose, logits) in enumerate(lesson.distributions(head, rows, 4)):
            slots = later if place else first
            p, q = distributions[:, whose][:, slots], logits.softmax(-1)[:, slots]
            apart.append(float((p * (p / q).log()).sum(-1).mean()))
            missed.append(-float(torch.minimum(p, q).sum(-1).log().mean()))
        to_begin_with, at_the_end = (float(lesson.loss(head, rows, at, draw.manual_seed(3))) for at in (FIRST, 1.0))
    assert to_begin_with == pytest.approx(_weighted(apart[:1] if steps else apart), rel=1e-3)
    assert at_the_end == pytest.approx(_weighted(missed), rel=1e-3)


def _weighted(places: list[float]) -> float:
    return sum(0.8**place * lost for place, lost in enumerate(places)) / sum(0.8**place for place in range(len(places)))


def test_a_head_begins_with_what_a_linear_map_foretells(target: str, tmp_path: Path):
    lesson, spoken = taught(target, tmp_path, samples=64, draft_vocab=64)
    torch.manual_seed(0)
    begun = lesson.begin(spoken, settings_of(target, draft_vocab=64))
    before = by_place(lesson, begun, spoken)["overlap"][0]
    torch.nn.init.normal_(begun.encoder.fc.weight, std=0.02)
    assert before > by_place(lesson, begun, spoken)["overlap"][0] + 0.03


@pytest.mark.parametrize(
    ("kind", "make"),
    [("eagle3", tiny_gpt2), ("eagle3", tiny_gemma2), ("medusa", tiny_gemma2), ("pass", tiny_gpt2)],
)
def test_heads_are_trained_for_targets_of_other_kinds(kind: str, make: Any, tmp_path: Path):
    """One has learned positions and no key-value groups, the other caps its logits and counts by windows."""
    found = train_head(kind, str(make(tmp_path / "target")), tmp_path / "head", PROMPTS, **small(kind, steps=3))
    assert 0 < found["after"]["overlap"][0] < 1


def test_a_target_whose_logits_are_more_than_a_projection_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = tiny_gemma2(tmp_path / "target")
    monkeypatch.setattr(Teacher, "logits", lambda self, last: self.model.get_output_embeddings()(last))  # uncapped
    with pytest.raises(RequestError, match="makes its logits of its last hidden state otherwise than by its vocabu"):
        Teacher(open_checkpoint(str(made)), "cpu")


def test_minutes_end_the_writing_and_the_training(target: str, tmp_path: Path):
    endless = SMALL | {"samples": 1000, "steps": 10**6}
    found = train_head("eagle3", target, tmp_path / "head", PROMPTS, minutes=1e-9, **endless)
    assert (found["rows"], found["steps"]) == (16, 1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"draft_vocab": 32}, "holds a training with --draft-vocab 48, and not 32; say the same to go on, or remove"),
        ({"prompts": ["other"]}, "holds a training with other --prompts; say the same to go on, or remove"),
    ],
)
def test_a_training_with_other_settings_is_not_gone_on_with(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
):
    with monkeypatch.context() as patched:
        patched.setattr(learning, "_step", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_head("eagle3", target, tmp_path / "head", PROMPTS, **SMALL)
    with pytest.raises(RequestError, match=re.escape(said)):
        train_head("eagle3", target, tmp_path / "head", **{"prompts": PROMPTS} | SMALL | changed)
    (tmp_path / ".head.training" / "state.safetensors").write_bytes(b"no state")
    with pytest.raises(RequestError, match="is not the state of a training; remove "):
        train_head("eagle3", target, tmp_path / "head", PROMPTS, **SMALL)


def _interrupted(*_: Any) -> float:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "hydra"}, "the kind is 'hydra', expected one of draft, eagle3, mtp, medusa, blockwise, pass"),
        ({"kind": "medusa"}, "--draft-vocab is for eagle3 and says nothing to medusa; leave it out"),
        ({"heads": 3}, "--heads is for medusa, blockwise, pass and says nothing to eagle3; leave it out"),
        ({"rank": 2}, "--rank is for pass and says nothing to eagle3; leave it out"),
        ({"kind": "pass", "rank": 0, "draft_vocab": None, "mlp": None}, "--rank is 0, expected at least 1"),
        ({"kind": "blockwise", "draft_vocab": None, "heads": 0}, "--heads is 0, expected at least 1"),
        ({"kind": "blockwise", "draft_vocab": None, "heads": 32}, "--heads is 32, expected at most 31: --length is 32"),
        ({"mlp": 0}, "--mlp is 0, expected at least 1"),
        ({"samples": 1}, "--samples is 1, expected at least 2"),
        ({"length": 7}, "--length is 7, expected at least 8"),
        ({"batch": 0}, "--batch is 0, expected at least 1"),
        ({"steps": 0}, "--steps is 0, expected at least 1"),
        ({"draft_vocab": 1}, "--draft-vocab is 1, expected at least 2"),
        ({"minutes": 0}, "--minutes is 0, expected more than 0"),
        ({"rate": float("nan")}, "--rate is nan, expected a number between 0 and 1"),
        ({"device": "warp"}, "--device is 'warp', which torch cannot use here"),
        ({"prompts": [""]}, "the longest prompt has 0 tokens, expected 1 to 31: --length is 32"),
        ({"prompts": ["a" * 40]}, "the longest prompt has 40 tokens, expected 1 to 31: --length is 32"),
        ({"length": 1000}, "--length is 1000, expected at most 256, the positions of the target"),
        ({"samples": 10**13}, "what the target says takes "),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_and_nothing_is_written(
    target: str, tmp_path: Path, settings: dict[str, Any], said: str
):
    given = {"kind": "eagle3", "prompts": PROMPTS} | SMALL | settings
    with pytest.raises(RequestError, match=re.escape(said)):
        train_head(target=target, out=tmp_path / "head", **given)
    assert not list(tmp_path.iterdir())


def test_a_place_that_holds_other_things_is_refused_before_anything_is_learned(target: str, tmp_path: Path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "mine").write_text("mine")
    with pytest.raises(ExportError, match="holds other things than a bundle"):
        train_head("eagle3", target, tmp_path / "head", PROMPTS, **SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["head"]
