"""Our EAGLE-3, MTP, P-EAGLE, DFlash and DSpark, read as `speculators` saves them, say what its own classes say.

The package pins older libraries than ours, so it is installed without them, beside them. What it imports for training
alone, and never runs here, is an empty module.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trt_spec.export.checking.oracle import hidden_states
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.kinds import open_head
from trt_spec.export.tracing.hidden_states import LAST

from ..kit.heads import dflash_head, eagle3_head, mtp_head
from ..kit.models import tiny_llama

PACKAGES = ["speculators==0.9.0", "pydantic-settings", "python-dotenv", "loguru"]
STEPS = 3
REFERENCE = """
import importlib.abc, importlib.machinery, importlib.metadata, sys, types

FOR_TRAINING = "aiohttp datasets deepspeed hs_connectors openai pybase64 tensorboard trackio wandb".split()

class Empty(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in FOR_TRAINING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Empty(spec.name)
    def exec_module(self, module):
        module.__path__ = []

sys.meta_path.insert(0, Finder())
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

def say(head, given, out):
    config = Eagle3SpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model, inputs = Eagle3DraftModel(config), load_file(given)
    left = model.load_state_dict(load_file(head + "/model.safetensors"), strict=False)
    assert not left.unexpected_keys, left
    assert set(left.missing_keys) <= {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}, left
    model.embed_tokens.weight.data = inputs["embedding"]
    said = []
    model.lm_head.register_forward_hook(lambda module, given, logits: said.append(logits[0].clone()))
    ids = inputs["ids"][None]
    with torch.no_grad():
        model.eval()(
            hidden_states=inputs["hidden"][None], input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=STEPS
        )
    save_file({str(step): logits for step, logits in enumerate(said)}, out)
    model.save_pretrained(head.replace("/head", "/saved"))

from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

def say_mtp(head, given, out):
    config = MTPSpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model, inputs = MTPDraftModel(config), load_file(given)
    left = model.load_state_dict(load_file(head + "/model.safetensors"), strict=False)
    assert not left.unexpected_keys, left
    assert not any(key.startswith("mtp_layers") for key in left.missing_keys), left
    model.embed_tokens.weight.data, model.lm_head.weight.data = inputs["embedding"], inputs["projection"]
    ids = inputs["text"][None]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, hidden_states=inputs["last"][None])[0]
    save_file({str(step): one[0].contiguous() for step, one in enumerate(logits)}, out)
    model.save_pretrained(head.replace("/head", "/saved"))

class Said(Exception):
    "raised where the loss would begin"

def stops(said):
    def hook(module, given, logits):
        said.append(logits[0].clone())
        raise Said
    return hook

from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
import speculators.models.peagle.core as peagle

def say_peagle(head, given, out):
    config = PEagleSpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model, inputs = PEagleDraftModel(config), load_file(given)
    left = model.load_state_dict(load_file(head + "/model.safetensors"), strict=False)
    assert not left.unexpected_keys, left
    model.embed_tokens.weight.data = inputs["embedding"]
    ids = inputs["ids"][None]
    count, kept = ids.shape[1], ids.shape[1] - STEPS + 1
    anchors = torch.cat([torch.arange(count), *[torch.arange(kept)] * (STEPS - 1)])
    depths = torch.cat([torch.zeros(count), *[torch.full((kept,), step) for step in range(1, STEPS)]]).long()
    peagle.generate_cod_sample_indices = lambda **_: (anchors, depths)
    said = []
    model.lm_head.register_forward_hook(stops(said))
    with torch.no_grad():
        try:
            model.eval()(hidden_states=inputs["hidden"][None], input_ids=ids, document_ids=torch.zeros_like(ids),
                         verifier_last_hidden_states=inputs["hidden"][None])
        except Said:
            pass
    save_file({str(step): said[0][depths == step] for step in range(STEPS)}, out)
    model.save_pretrained(head.replace("/head", "/saved"))

from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
import speculators.models.dflash.core as dflash

def say_dflash(head, given, out):
    config = DFlashSpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model, inputs = DFlashDraftModel(config), load_file(given)
    left = model.load_state_dict(load_file(head + "/model.safetensors"), strict=False)
    assert not left.unexpected_keys, left
    model.embed_tokens.weight.data = inputs["embedding"]
    anchors = inputs["anchors"]
    dflash.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    ids, said = inputs["text"][None], []
    for wanted in (model.verifier_lm_head, model.verifier_norm):
        wanted.weight.data.zero_()
    model.lm_head.register_forward_hook(stops(said))
    with torch.no_grad():
        try:
            model.eval()(hidden_states=inputs["all"][None], input_ids=ids, loss_mask=torch.ones_like(ids),
                         verifier_last_hidden_states=inputs["last"][None], document_ids=torch.zeros_like(ids),
                         max_anchors=len(anchors))
        except Said:
            pass
    save_file({"0": said[0].view(len(anchors), config.block_size, -1).contiguous()}, out)
    model.save_pretrained(head.replace("/head", "/saved"))

from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
import speculators.models.dspark.core as dspark

def say_dspark(head, given, out):
    config = DSparkSpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    model, inputs, said = DSparkDraftModel(config), load_file(given), {}
    left = model.load_state_dict(load_file(head + "/model.safetensors"), strict=False)
    assert not left.unexpected_keys, left
    assert not any(key.startswith(("markov", "confidence")) for key in left.missing_keys), left
    model.embed_tokens.weight.data = inputs["embedding"]
    if "lm_head.weight" in left.missing_keys:
        model.lm_head.weight.data = inputs["projection"]
    anchors = inputs["anchors"]
    dflash.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    for wanted in (model.verifier_lm_head, model.verifier_norm):
        wanted.weight.data.zero_()
    def stop(logits, targets, confidence, *rest, **more):
        shape = len(anchors), config.block_size
        said.update(distributions=logits.view(*shape, -1).contiguous(), sure=confidence.view(shape).sigmoid())
        raise Said
    dspark.compute_metrics, ids = stop, inputs["text"][None]
    with torch.no_grad():
        try:
            model.eval()(hidden_states=inputs["all"][None], input_ids=ids, loss_mask=torch.ones_like(ids),
                         verifier_last_hidden_states=inputs["last"][None], document_ids=torch.zeros_like(ids),
                         max_anchors=len(anchors))
        except Said:
            pass
    save_file(said, out)
    model.save_pretrained(head.replace("/head", "/saved"))

KINDS = {"mtp": say_mtp, "peagle": say_peagle, "dflash": say_dflash, "dspark": say_dspark}
for folder in sys.argv[1:]:
    KINDS.get(folder.rpartition("/")[2].partition(" ")[0], say)(folder + "/head", folder + "/given", folder + "/said")
""".replace("STEPS", str(STEPS))
LAYERS = (0, 1, 2)
SPECULATORS = {
    "algorithm": "eagle3",
    "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": STEPS}],
    "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
}
OF_DFLASH = {"speculators_config": SPECULATORS | {"algorithm": "dflash"}}
DSPARK: dict[str, dict[str, Any]] = {
    "dspark": {"draft_vocab": 48},
    "dspark whose anchor is silent": {"draft_vocab": 48, "sample_from_anchor": False},
    "dspark of all tokens": {"confidence": 32},
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab": 48},
    "normed residual": {"draft_vocab": 48, "norm_before_residual": True},
    "states behind the norm": {"draft_vocab": 48, "norm_output": True},
    "one norm before fc": {"draft_vocab": 48, "norms": "input"},
    "a norm of each": {"draft_vocab": 48, "norms": "each"},
    "two layers": {"draft_vocab": 48, "layers": 2},
    "layers of Qwen3": {"draft_vocab": 48, "kind": "qwen3"},
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculators")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([*install, *PACKAGES], check=True)
    return folder


@pytest.mark.clients
@torch.no_grad()
def test_each_step_of_a_head_that_the_reference_saved_says_what_it_says(package: Path, tmp_path: Path) -> None:
    """All forms in one process, which takes long to load its libraries."""
    target = tiny_llama(tmp_path / "target", initializer_range=0.2, num_hidden_layers=3)
    teacher, tokens = load_model(open_checkpoint(target), "float32"), [(7 * i * i + 3 * i) % 64 for i in range(40)]
    hidden, _ = hidden_states(teacher, torch.tensor([tokens]))
    read = torch.cat([hidden[layer][0] for layer in LAYERS], -1)[:-1].contiguous()
    given = {"ids": torch.tensor(tokens[1:]), "hidden": read, "embedding": teacher.get_input_embeddings().weight.data}
    usual = {"norm_before_residual": False, "norm_output": False, "scale": 0.2, "speculators_config": SPECULATORS}
    for form, fields in FORMS.items():
        eagle3_head(tmp_path / form / "head", target, read=LAYERS, **usual | fields)
        save_file(given, tmp_path / form / "given")
    last = hidden[LAST][0].contiguous()
    text = {"text": torch.tensor(tokens), "last": last, "embedding": given["embedding"]}
    projection = teacher.lm_head.weight.data
    mtp_head(tmp_path / "mtp" / "head", target, scale=0.2, speculators_config=SPECULATORS | {"algorithm": "mtp"})
    save_file(text | {"projection": projection}, tmp_path / "mtp" / "given")
    eagle3_head(tmp_path / "peagle" / "head", target, 48, read=LAYERS, mask=63, layers=2, **usual)
    save_file(given, tmp_path / "peagle" / "given")
    dflash_head(tmp_path / "dflash" / "head", target, draft_vocab=48, read=LAYERS, scale=0.2, **OF_DFLASH)
    anchors, each = [2, 9, 17, 30], torch.cat([hidden[layer][0] for layer in LAYERS], -1)
    save_file(text | {"all": each.contiguous(), "anchors": torch.tensor(anchors)}, tmp_path / "dflash" / "given")
    for form, fields in DSPARK.items():
        config = {"speculators_config": SPECULATORS | {"algorithm": "dspark"}} | fields
        dflash_head(tmp_path / form / "head", target, read=LAYERS, scale=0.3, rank=8, **config)
        of_blocks = {"all": each.contiguous(), "anchors": torch.tensor(anchors), "projection": projection}
        save_file(text | of_blocks, tmp_path / form / "given")
    every = [*FORMS, "mtp", "peagle", "dflash", *DSPARK]
    command = [sys.executable, "-P", "-c", REFERENCE, *(str(tmp_path / form) for form in every)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(package)})
    for form in every:
        assert "auto_map" in json.loads((tmp_path / form / "saved" / "config.json").read_text()), form
    contract = open_checkpoint(target).shape.contract(256, "float32")
    for form in [*FORMS, "peagle"]:
        opened = open_head(tmp_path / form / "saved")
        assert opened is not None
        head = opened.kind.load(opened, teacher, contract, Sample(tokens, 64)).module
        head.wiring = replace(head.wiring, layers=LAYERS)
        features = head.encoder([hidden[layer][:, :-1] for layer in LAYERS])
        steps, said = (
            list(head.unrolled(torch.tensor([tokens[1:]]), features, STEPS)),
            load_file(tmp_path / form / "said"),
        )
        assert len(said) == len(steps) == STEPS
        for step, normed in enumerate(steps):
            valid = min(len(tokens) - 1 - step, len(said[str(step)]))  # the others lack their token
            expected = said[str(step)][:valid]
            torch.testing.assert_close(head.lm_head(normed)[0, :valid], expected, atol=1e-4, rtol=1e-4, msg=form)
    opened = open_head(tmp_path / "mtp" / "saved")
    assert opened is not None
    head = opened.kind.load(opened, teacher, contract, Sample(tokens, 64)).module
    said, made = load_file(tmp_path / "mtp" / "said"), last[None]
    assert len(said) == STEPS
    for step in range(STEPS):  # in training a step sees its own slots alone; before the first stands one that none sees
        valid = said[str(step)].shape[0]
        ids = torch.tensor([[0, *tokens[step + 1 : step + 1 + valid]]])
        read = torch.cat([torch.zeros_like(made[:, :1]), made[:, :valid]], 1)
        made = head(ids, read, torch.arange(valid + 1)[None])[0][:, 1:]
        torch.testing.assert_close(head.lm_head(made)[0], said[str(step)], atol=1e-4, rtol=1e-4, msg=f"mtp {step}")
    opened = open_head(tmp_path / "dflash" / "saved")
    assert opened is not None
    head = opened.kind.load(opened, teacher, contract, Sample(tokens, 64)).module
    features = head.encoder([hidden[layer] for layer in LAYERS])[0]
    found = head.said(torch.tensor(tokens), features, anchors)
    chosen = (head.places < 48).nonzero()[:, 0]
    expected = load_file(tmp_path / "dflash" / "said")["0"][:, 1:]
    torch.testing.assert_close(found[..., chosen], expected, atol=1e-4, rtol=1e-4, msg="dflash")
    for form in DSPARK:
        opened = open_head(tmp_path / form / "saved")
        assert opened is not None
        head = opened.kind.load(opened, teacher, contract, Sample(tokens, 64)).module
        features = head.encoder([hidden[layer] for layer in LAYERS])[0]
        expected, places = load_file(tmp_path / form / "said"), head.block.proposals
        distributions, sure = expected["distributions"][:, -places:], expected["sure"][:, -places:]
        states = head.blocks(torch.tensor(tokens), features, anchors)
        before = torch.tensor([tokens[anchor : anchor + places] for anchor in anchors])
        said = head.said(torch.tensor(tokens), features, anchors)
        chosen = head.tables()["tokens"]
        assert len(chosen) == distributions.shape[2]
        torch.testing.assert_close(said[..., chosen], distributions, atol=1e-4, rtol=1e-4, msg=form)
        torch.testing.assert_close(head.confidence(states, before), sure, atol=1e-4, rtol=1e-4, msg=form)
