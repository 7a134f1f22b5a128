"""TensorRT plans of targets that keep features, and of the heads that read them: compiled for RTX."""

from pathlib import Path

import pytest
from trt_spec.engines import Bundle, Contract, Masks, keys_and_values
from trt_spec.engines.tensorrt import PlanKey
from trt_spec.export.plans.compiler import Compiler
from trt_spec.export.plans.roles import BuildOptions, Role, roles

from ...kit.bundles import export_pair
from ...kit.heads import dflash_head, eagle3_head, mtp_head, parallel_heads
from ...kit.models import tiny_llama


def test_a_head_has_a_first_step_for_all_that_a_round_commits_and_heads_that_keep_nothing_speak_at_once(
    tmp_path: Path,
) -> None:
    bundle = two_heads(tmp_path, dtype="float16")
    contracts = {name: bundle.models[name].contract for name in bundle.heads}
    found = roles(BuildOptions("tensorrt-rtx", ["8.9"], batch=(1, 4), draft_length=3, prefill_width=32), [], contracts)
    assert [role for role in found if role.model != "target"] == [
        Role("first", "eagle3", 4, 1, (1, 4)),
        Role("decode", "eagle3", 1, 1, (1, 4)),
        Role("prefill", "eagle3", 32, 1, (1, 1)),
        Role("decode", "medusa", 1, 3, (1, 4)),
    ]


def test_what_reads_masks_says_all_of_a_round_behind_all_that_one_commits() -> None:
    contract = Contract(1, 2, keys_and_values(1, 2, 16, "float32"), 64, 256, "float32")
    options = BuildOptions("tensorrt-rtx", ["8.9"], batch=(1, 4), draft_length=3, prefill_width=32)
    masks = {"draft": Masks(63), "dflash": Masks(63, 7, repeats=True, first=2)}
    found = roles(options, ["draft"], {"dflash": contract}, masks)
    assert [role for role in found if role.model != "target"] == [
        Role("masks", "draft", 6, 3, (1, 4)),
        Role("masks", "dflash", 12, 3, (1, 4)),
        Role("prefill", "dflash", 32, 1, (1, 1)),
        Role("first", "draft", 2, 1, (1, 4)),
        Role("decode", "draft", 1, 1, (1, 4)),
        Role("prefill", "draft", 32, 1, (1, 1)),
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["peagle", "dflash", pytest.param("mtp", marks=pytest.mark.exhaustive)])
def test_plans_of_a_head_compile(tmp_path: Path, kind: str) -> None:
    target = tiny_llama(tmp_path / "target", num_hidden_layers=2)
    head = {
        "peagle": lambda path: eagle3_head(path, target, 48, read=(0, 1), mask=63),
        "dflash": lambda path: dflash_head(path, target, read=(1,), layers=1),
        "mtp": lambda path: mtp_head(path, target),
    }[kind](tmp_path / "head")
    bundle = Bundle.open(export_pair(target, tmp_path / "bundle", [head], dtype="float16").bundle)
    contract, masks = bundle.models[kind].contract, bundle.models[kind].masks
    options = BuildOptions("tensorrt-rtx", ["8.9"], batch=(1, 4), draft_length=3, prefill_width=0)
    for role in roles(options, [], {kind: contract}, {} if masks is None else {kind: masks})[1:]:
        sizes = (role.width, role.rows, role.batch, bundle.capacity)
        key = PlanKey(role.model, "any", "tensorrt-rtx", "any", "8.9", *sizes, unfused_attention=True)
        plan = Compiler("tensorrt-rtx").compile(bundle.graph(kind), contract, key, tmp_path / "timings")
        assert len(bytes(plan)) > 10_000


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_plans_of_a_target_with_two_heads_and_of_both_compile(tmp_path: Path, dtype: str) -> None:
    """Features of two heads of one size are one state: over two such states the library crashes."""
    bundle, compiler = two_heads(tmp_path, dtype=dtype), Compiler("tensorrt-rtx")
    contracts = {name: bundle.models[name].contract for name in bundle.heads}
    assert bundle.target.contract.states[0].shape == (1, 64)
    for role in roles(BuildOptions("tensorrt-rtx", ["8.9"], batch=(1, 4), draft_length=3), [], contracts):
        if role.name == "prefill":
            continue
        sizes = (role.width, role.rows, role.batch, bundle.capacity)
        key = PlanKey(role.model, "any", "tensorrt-rtx", "any", "8.9", *sizes, unfused_attention=dtype == "float16")
        contract = bundle.models[role.model].contract
        assert len(bytes(compiler.compile(bundle.graph(role.model), contract, key, tmp_path / "timings"))) > 10_000


def two_heads(folder: Path, **options: str) -> Bundle:
    target = tiny_llama(folder / "target", num_hidden_layers=1)
    heads = [
        eagle3_head(folder / "eagle3", target, 48, read=(0,), eagle_aux_hidden_state_layer_ids=[0]),
        parallel_heads(folder / "medusa", target, "medusa"),
    ]
    return Bundle.open(export_pair(target, folder / "bundle", heads, **options).bundle)
