"""Plans are really compiled, for GPUs that are not here, from graphs whose numbers are those of the exported ones."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tensorrt_rtx as trt
import torch
from filelock import FileLock
from trt_spec.engines import SLACK, TOKEN, Bundle, EngineError, ExportError, line
from trt_spec.engines.bundle import FOREIGN
from trt_spec.engines.tensorrt import PlanKey, read_plan
from trt_spec.export import export_bundle
from trt_spec.export.checking.scenarios import RowCall, random_tree
from trt_spec.export.families.table import WITH_SOURCES, WORKS
from trt_spec.export.passes.pack_queries import pack_queries
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.plans import build
from trt_spec.export.plans.audit import audit
from trt_spec.export.plans.build import build_plans
from trt_spec.export.plans.compiler import REWRITES, Compiler, prepare
from trt_spec.export.plans.roles import BuildOptions, Role, roles
from trt_spec.tools.cli import main

from ...kit import bundles
from ...kit.bundles import Pair, export_pair, save_graph
from ...kit.families import tiny_checkpoint
from ...kit.machine_faults import no_file_larger_than
from ...kit.models import tiny_llama
from ...kit.quantised_models import KINDS, write_quantised
from ...kit.source_models import tiny_with_source
from ...kit.toys import Toy
from .forms import forms, forms_of_plan
from .running import run

ONE_LAYER = {"num_hidden_layers": 1}
CAPACITY = 64 + SLACK
VERIFY = PlanKey("target", "", "tensorrt-rtx", trt.__version__, "8.9", 5, 5, (1, 1), CAPACITY)


def options(**settings: Any) -> BuildOptions:
    return BuildOptions(**{"engine": "tensorrt-rtx", "compute_capabilities": ["8.9"]} | settings)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in float16 with a draft."""
    folder = tmp_path_factory.mktemp("half")
    target, draft = tiny_llama(folder / "target"), tiny_llama(folder / "draft", seed=1, num_hidden_layers=1)
    export_pair(target, folder / "bundle", draft, max_length=64, dtype="float16")
    return folder / "bundle"


# The graph that TensorRT gets.


@pytest.mark.parametrize(
    ("family", "weights", "fired"),
    [
        ("llama", "none", {"pack_queries": 1}),
        ("mistral", "none", {"pack_queries": 1}),
        ("gemma2", "none", {"spell_softcap": 2}),
        ("diffllama", "none", {"merge_attentions": 1}),
        ("persimmon", "none", {"spell_picks": 3, "pack_queries": 1}),
        ("llama", "int8", {"unstack_heads": 1, "widen_lookups": 1, "pack_queries": 1}),
    ],
)
def test_the_passes_fire_where_they_should_and_keep_the_numbers(
    tmp_path: Path, family: str, weights: str, fired: dict[str, int]
) -> None:
    settings = {} if weights == "none" else {"weights": Quantisation(weights)}
    layers = {} if family == "gemma2" else ONE_LAYER  # of two kinds
    export_pair(tiny_checkpoint(family, tmp_path / "checkpoint", **layers), tmp_path / "bundle", **settings)
    bundle = Bundle.open(tmp_path / "bundle")
    contract, graph = bundle.target.contract, bundle.graph("target")
    prepared, counted = prepare(graph, VERIFY)
    assert counted.pop("specialise") > 0
    assert {name: count for name, count in counted.items() if count} == fired

    generator = np.random.default_rng(0)
    batch, start = 3, np.array([0, 7, 40])
    feeds = {
        "input_ids": generator.integers(64, size=(batch, 5)),
        "start": start,
        "logit_rows": np.tile(np.arange(5), (batch, 1)),
        **{
            f"past_{state.name}": generator.standard_normal(state.memory(batch, CAPACITY), dtype=np.float32)
            for state in contract.states
        },
    }
    for places in (line(batch, 5, "cpu"), trees(batch, 5)):
        given = feeds | {name: tensor.numpy() for name, tensor in places.items()}
        expected = run(ir.load(graph), given, graph.parent)
        for ours, theirs in zip(run(prepared, given, graph.parent), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.usefixtures("compiled_here")
def test_zero_points_are_refused_by_name_and_the_same_numbers_compile_in_int8(tmp_path: Path) -> None:
    checkpoint, _ = write_quantised(KINDS["awq"], tmp_path)
    kept = {"check": False, "max_length": 64}
    export_bundle(checkpoint, tmp_path / "int4", weights=Quantisation("int4"), **kept)
    with pytest.raises(ExportError) as refused:
        prepare(Bundle.open(tmp_path / "int4").graph("target"), VERIFY)
    assert str(refused.value) == (
        "tensorrt-rtx takes no weights with zero points, which the target graph keeps as its checkpoint has them; "
        "export with --weights int8, which keeps the same numbers without"
    )
    export_bundle(checkpoint, tmp_path / "int8", weights=Quantisation("int8"), **kept)
    assert build_plans(tmp_path / "int8", options(draft_length=1)).built > 0


@pytest.mark.usefixtures("compiled_here")
def test_matrices_of_fp8_compile(tmp_path: Path) -> None:
    export_pair(tiny_llama(tmp_path / "c"), tmp_path / "b", max_length=64, dtype="float16", weights=Quantisation("fp8"))
    assert build_plans(tmp_path / "b", options(draft_length=3)).built > 0


@pytest.mark.usefixtures("compiled_here")
def test_matrices_of_nvfp4_compile_for_gpus_that_have_it_and_are_refused_for_others(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "c", **ONE_LAYER, hidden_size=512, intermediate_size=4096)
    how = {"dtype": "float16", "weights": Quantisation("nvfp4")}
    export_pair(checkpoint, tmp_path / "b", max_length=64, **how)
    with pytest.raises(ExportError) as refused:
        build_plans(tmp_path / "b", options(draft_length=3, compute_capabilities=["12.0", "8.9"]))
    assert str(refused.value) == (
        "the target has its weights in nvfp4, which GPUs of compute capability 8.9 cannot read, expected 10.0 or "
        "later; export with --weights fp8 or int4 for these"
    )
    assert not list((tmp_path / "b").rglob("*.plan"))
    built = build_plans(tmp_path / "b", options(draft_length=3, compute_capabilities=["12.0"]))
    in_float16 = 2 * built.bundle.target.parameters
    assert all(plan.bytes < 0.8 * in_float16 for plan in built.plans), "and hold it as it is stored"


@pytest.fixture
def toy_graph(tmp_path: Path) -> Callable[[Toy], Path]:
    def saved(toy: Toy) -> Path:
        (tmp_path / "target").mkdir()
        save_graph(toy.graph(), tmp_path, "target")
        return tmp_path / "target" / "model.onnx"

    return saved


def test_states_of_other_kinds_have_the_same_numbers_in_what_tensorrt_gets(toy_graph: Callable[[Toy], Path]) -> None:
    """It is given keys and values alike, features of tokens and a summary of each row."""
    toy = Toy(value_size=16)
    graph, generator, start = toy_graph(toy), np.random.default_rng(0), np.array([0, 7, 40])
    feeds = {
        "input_ids": generator.integers(64, size=(3, 5)),
        "start": start,
        "logit_rows": np.tile(np.arange(5), (3, 1)),
    }
    for state in toy.contract.states:
        feeds[f"past_{state.name}"] = generator.standard_normal(state.memory(3, CAPACITY), dtype=np.float32)
    feeds["past_summary"][:, 0] = [0, 3, 40]
    given = feeds | {name: tensor.numpy() for name, tensor in trees(3, 5).items()}
    found = run(prepare(graph, VERIFY)[0], given, graph.parent)
    for ours, theirs in zip(found, run(ir.load(graph), given, graph.parent), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def trees(batch: int, width: int) -> dict[str, torch.Tensor]:
    random = Random(0)
    rows = [RowCall([0] * width, 0, 0, random_tree(random, width, width)[0], []) for _ in range(batch)]
    depths, ancestors = [row.depths for row in rows], [row.ancestors for row in rows]
    return {"depths": torch.tensor(depths), "ancestors": torch.tensor(ancestors)}


# Plans.


def test_all_roles_of_a_pair_are_compiled_once_and_described(half: Path) -> None:
    said: list[str] = []
    report = build_plans(half, options(batch=(1, 8), draft_length=3, prefill_width=32), said.append)
    assert [(plan.key.model, plan.role, plan.key.width, plan.key.rows) for plan in report.plans] == [
        ("target", "verify", 4, 4),
        ("target", "prefill", 32, 1),
        ("draft", "first", 2, 1),
        ("draft", "decode", 1, 1),
        ("draft", "prefill", 32, 1),
    ]
    assert report.built == 5
    assert len(said) == 5
    contract = Bundle.open(half).target.contract
    for plan in report.plans:
        file = half / plan.key.path
        assert file.stat().st_size == plan.bytes > 10_000
        assert read_plan(file.with_suffix(".json")) == plan
        assert plan.key.compute_capability == "8.9"
        assert plan.key.version == plan.made_by["tensorrt-rtx"] == trt.__version__
        assert plan.key.capacity == CAPACITY
    assert report.plans[0].aliases == contract.aliases
    assert report.plans[0].inputs == [str(spec) for spec in contract.inputs]

    before = {file: file.stat().st_mtime_ns for file in half.rglob("*.plan")}
    again = build_plans(half, options(batch=(1, 8), draft_length=3, prefill_width=32))
    assert again.built == 0
    assert again.plans == report.plans
    assert {file: file.stat().st_mtime_ns for file in half.rglob("*.plan")} == before
    assert not [file for file in half.rglob(".*") if file.is_file()]
    Bundle.open(half)  # plans are no part of what was exported


def test_every_draft_of_a_bundle_has_the_roles_of_a_draft() -> None:
    settings = options(batch=(1, 8), draft_length=3, prefill_width=32)
    of_one, of_two = roles(settings, ["draft"]), roles(settings, ["draft", "draft2"])
    assert of_two[: len(of_one)] == of_one
    assert of_two[len(of_one) :] == [replace(role, model="draft2") for role in of_one if role.model == "draft"]
    assert len(of_two) == 8


def test_drafts_have_plans_as_wide_as_those_that_verify_only_where_they_are_asked_for() -> None:
    settings = {"batch": (1, 8), "draft_length": 4, "siblings": 8}
    without = roles(options(**settings), ["draft", "draft2"])
    found = roles(options(**settings, draft_trees=True), ["draft", "draft2"])
    assert [role for role in found if role not in without] == [
        Role("tree", draft, 13, 13, (1, 8)) for draft in ("draft", "draft2")
    ]
    assert not set(without).difference(found)


def test_a_draft_with_tokens_of_its_own_reads_several_first_and_no_trees() -> None:
    found = roles(options(batch=(1, 8), draft_length=3, prefill_width=32, draft_trees=True), [FOREIGN])
    assert [role for role in found if role.model == FOREIGN] == [
        Role("first", FOREIGN, 8, 1, (1, 8)),
        Role("decode", FOREIGN, 1, 1, (1, 8)),
        Role("prefill", FOREIGN, 32, 1, (1, 1)),
    ]


def test_the_plan_of_a_draft_that_reads_trees_is_compiled_and_its_mask_is_that_of_the_graph(
    half: Path, tmp_path: Path
) -> None:
    [role] = [one for one in roles(options(siblings=8, draft_trees=True), ["draft"]) if one.name == "tree"]
    key = replace(VERIFY, model=role.model, width=role.width, rows=role.rows, batch=role.batch)
    bundle, compiler = Bundle.open(half), Compiler("tensorrt-rtx")
    graph, contract = bundle.graph("draft"), bundle.models["draft"].contract
    assert len(bytes(compiler.compile(graph, contract, key, tmp_path / "timings"))) > 10_000
    network = ir.to_proto(prepare(graph, key)[0])
    audit(trt, parse(network, graph)[0], contract, key.sizes)
    naive(network)
    kept = parse(network, graph)
    with pytest.raises(ExportError, match="right for the first call only"):
        audit(trt, kept[0], contract, key.sizes)


@pytest.mark.parametrize("shape", [{}, {"width": 1, "rows": 1, "batch": (1, 3)}], ids=["verify", "decode"])
def test_states_of_other_kinds_are_compiled(
    tmp_path: Path, toy_graph: Callable[[Toy], Path], shape: dict[str, Any]
) -> None:
    toy, key = Toy(value_size=16), replace(VERIFY, **shape)
    plan = Compiler("tensorrt-rtx").compile(toy_graph(toy), toy.contract, key, tmp_path / "timings")
    assert len(bytes(plan)) > 10_000


def test_keys_and_values_of_unlike_sizes_are_refused_by_name(tmp_path: Path, toy_graph: Callable[[Toy], Path]) -> None:
    toy = Toy(value_size=24)
    with pytest.raises(
        ExportError, match=r"cannot read node \S+ \(Attention\) of the target graph: .*Key and Value must have the same"
    ):
        Compiler("tensorrt-rtx").compile(toy_graph(toy), toy.contract, VERIFY, tmp_path / "timings")


def test_plans_are_compiled_so_that_they_may_be_captured(half: Path, tmp_path: Path) -> None:
    flags = []

    def compiled(network: Any, config: Any, **_: Any) -> bytes:
        flags.append(config(*network).get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION))
        return b""

    bundle, compiler = Bundle.open(half), Compiler("tensorrt-rtx")
    with patch("polygraphy.backend.trt.engine_bytes_from_network", compiled):
        compiler.compile(bundle.graph("target"), bundle.target.contract, VERIFY, tmp_path / "timings")
    assert flags == [True]


@pytest.mark.parametrize(
    ("dtype", "family", "settings", "capability", "without"),
    [
        ("float16", "llama", ONE_LAYER, "8.9", 1),
        ("float16", "gemma3_text", {}, "8.9", 1),
        pytest.param(
            "float16", "llama", ONE_LAYER | {"num_key_value_heads": 4}, "12.0", 1, marks=pytest.mark.exhaustive
        ),
        pytest.param("bfloat16", "llama", ONE_LAYER, "8.0", 1, marks=pytest.mark.exhaustive),
    ],
    ids=["grouped", "one layer with a window", "each head its own keys", "bfloat16"],
)
def test_attention_of_several_tokens_skips_what_no_row_sees(
    tmp_path: Path, dtype: str, family: str, settings: dict[str, int], capability: str, without: int
) -> None:
    """Plans of RTX hold the source of their kernels, and so their switch for this.

    So many layers do it `without` the pass: those with a window do not.
    """
    checkpoint = tiny_checkpoint(family, tmp_path / "checkpoint", **settings)
    export_pair(checkpoint, tmp_path / "bundle", max_length=64, dtype=dtype)
    bundle, compiler = Bundle.open(tmp_path / "bundle"), Compiler("tensorrt-rtx")
    contract, graph = bundle.target.contract, bundle.graph("target")
    key = replace(VERIFY, compute_capability=capability, batch=(1, 8))
    switch = b"USE_RUNTIME_SKIPPING = "
    plan = bytes(compiler.compile(graph, contract, key, tmp_path / "timings"))
    assert (plan.count(switch + b"1"), plan.count(switch)) == (contract.layers, contract.layers)
    copies = b"_ReshReplReshMove"  # a kernel that writes the cache once for each query head
    assert copies not in plan
    with patch("trt_spec.export.plans.compiler.REWRITES", tuple(one for one in REWRITES if one is not pack_queries)):
        plan = bytes(Compiler("tensorrt-rtx").compile(graph, contract, key, tmp_path / "timings"))
    assert (plan.count(switch + b"1"), plan.count(switch)) == (without, contract.layers)
    assert (copies in plan) == (contract.heads > contract.states[0].shape[0])


@pytest.mark.usefixtures("compiled_here")
def test_another_shape_gpu_or_graph_needs_another_plan(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1)
    pair = export_pair(checkpoint, tmp_path / "bundle", max_length=64, dtype="float16")
    keys = [
        plan.key.path
        for settings in (
            {},
            {"draft_length": 2},
            {"siblings": 20},
            {"batch": (1, 2)},
            {"compute_capabilities": ["8.0"]},
        )
        for plan in build_plans(pair.bundle, options(prefill_width=0, **settings)).plans
    ]
    assert len(set(keys)) == 5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "onnxruntime"}, "no engine 'onnxruntime' to build for, expected tensorrt or tensorrt-rtx"),
        ({"batch": (4, 2)}, "batch is 4..2, expected two numbers from 1 on"),
        ({"draft_length": 17}, "draft length is 17, expected 0 to 16"),
        ({"prefill_width": 3}, "prefill width is 3, expected 6 to"),
        ({"siblings": 61}, "siblings is 61, expected 0 to 60"),
        ({"siblings": 8, "prefill_width": 13}, "prefill width is 13, expected 14 to"),
        ({"compute_capabilities": ["sm89"]}, "compute capability is 'sm89', expected one like 8.9"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        options(**settings)


def test_a_gpu_that_the_library_does_not_know_or_that_is_not_here_is_refused(half: Path) -> None:
    with pytest.raises(EngineError, match=r"does not compile for compute capability 9.0, expected one of 7.5, 8.0"):
        build_plans(half, options(compute_capabilities=["9.0"]))
    with (
        patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(EngineError, match="no GPU here to build for; name one with --compute-capability"),
    ):
        build_plans(half, options(compute_capabilities=()))


@pytest.mark.parametrize(
    ("shape", "draft_length"),
    [
        ({"head_dim": 8}, 4),
        pytest.param(
            {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, 0, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["several tokens with small heads", "one token with few heads"],
)
def test_attention_without_a_fused_kernel_is_compiled_only_when_asked_for(
    tmp_path: Path, shape: dict[str, int], draft_length: int
) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1, **shape)
    export_pair(checkpoint, tmp_path / "bundle", max_length=64, dtype="float16")
    settings = {"prefill_width": 0, "draft_length": draft_length}
    with pytest.raises(ExportError, match="no fused kernel for this attention; --unfused-attention allows"):
        build_plans(tmp_path / "bundle", options(**settings))
    assert not list((tmp_path / "bundle").rglob("*.plan"))
    assert build_plans(tmp_path / "bundle", options(**settings, unfused_attention=True)).built == 1


def test_a_full_disk_leaves_no_half_plan(half: Path) -> None:
    before = sorted(filter(Path.is_file, half.rglob("*")))
    with (
        no_file_larger_than(100_000),
        pytest.raises(ExportError, match=r"cannot write plan .*: File too large; no half plan was left"),
    ):
        build_plans(half, options(draft_length=5, prefill_width=0))
    assert sorted(filter(Path.is_file, half.rglob("*"))) == before


@pytest.mark.usefixtures("compiled_here")
def test_what_a_killed_build_left_goes_with_the_next_one(half: Path) -> None:
    left = half / "plans" / "tensorrt-rtx-8.9" / ".verify-0123.plan.partial-0123abcd"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"half")
    assert build_plans(half, options(draft_length=0, prefill_width=16)).built > 0
    assert not list(half.rglob(".*"))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("raise SystemExit('no such symbol')", "no such symbol"),
    ],
)
def test_a_crash_of_the_library_is_one_sentence(half: Path, tmp_path: Path, program: str, reason: str) -> None:
    (tmp_path / "crashing.py").write_text(program)
    before = sorted(half.rglob("*"))
    with (
        patch.object(build, "COMPILER", "crashing"),
        patch.dict(os.environ, PYTHONPATH=str(tmp_path)),
        pytest.raises(ExportError, match=rf"crashed while compiling the target graph at width 7 for 8.9 \({reason}\)"),
    ):
        build_plans(half, options(draft_length=6, prefill_width=0))
    assert sorted(half.rglob("*")) == before


def test_without_the_exporters_libraries_the_command_says_what_to_install(half: Path) -> None:
    command = ["build", "--bundle", str(half), "--engine", "tensorrt-rtx", "--compute-capability", "8.9"]
    program = (
        "import sys; sys.modules['onnx_ir'] = None; from trt_spec.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "building for tensorrt-rtx needs onnx_ir; pip install 'trt-spec[export]'" in done.stderr


@pytest.mark.parametrize("missing", ["tensorrt_rtx", "polygraphy"])
def test_a_missing_library_is_named(half: Path, missing: str) -> None:
    with (
        patch.object(build, "find_spec", lambda name: None if name == missing else True),
        pytest.raises(EngineError, match=rf"needs {missing}; pip install 'trt-spec\[tensorrt-rtx\]'"),
    ):
        build_plans(half, options())


@pytest.mark.usefixtures("compiled_here")
def test_a_damaged_sidecar_or_plan_is_refused(half: Path) -> None:
    [plan] = build_plans(half, options(draft_length=0, prefill_width=0)).plans
    file = half / plan.key.path
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(EngineError, match=r"does not describe a plan .* it says .*; delete it and run trt-spec build"):
        build_plans(half, options(draft_length=0, prefill_width=0))
    file.with_suffix(".json").write_text("{}")
    with pytest.raises(EngineError, match="does not describe a plan"):
        read_plan(file.with_suffix(".json"))
    file.unlink()
    file.with_suffix(".json").unlink()
    assert build_plans(half, options(draft_length=0, prefill_width=0)).built == 1


def test_the_command_prints_a_table_and_json(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["build", "--bundle", str(half), "--engine", "tensorrt-rtx", "--compute-capability", "8.9"]
    command += ["--batch", "1..3", "--draft-length", "1", "--draft-trees", "--prefill-width", "0"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "target verify for 8.9: compiling" in printed.err
    lines = printed.out.splitlines()
    assert lines[0].split() == ["model", "role", "GPU", "width", "batch", "size", "seconds"]
    assert lines[1].split()[:5] == ["target", "verify", "8.9", "2", "1..3"]
    assert "4 of 4 plans compiled" in lines[-1]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["built"] == 0
    assert [plan["role"] for plan in found["plans"]] == ["verify", "first", "decode", "tree"]
    assert main(["build", "--bundle", str(half), "--engine", "tensorrt-rtx", "--compute-capability", "9.0"]) == 2


def test_the_command_counts_the_plans_of_a_draft_with_tokens_of_its_own(
    merging: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = []

    def stop(*_: object, total: int, **__: object) -> None:
        totals.append(total)
        raise ExportError("it was counted")

    monkeypatch.setattr("trt_spec.tools.commands.build.progress", stop)
    command = ["build", "--bundle", str(merging.bundle), "--engine", "tensorrt-rtx", "--compute-capability", "8.9"]
    assert main(command) == 2
    assert totals == [len(roles(options(), [FOREIGN]))]


# The audit.


def parse(model: onnx.ModelProto | bytes, graph: Path) -> tuple[Any, ...]:
    """The network and what keeps it alive."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model if isinstance(model, bytes) else model.SerializeToString(), str(graph))
    return network, builder, parser, logger


def nodes(model: onnx.ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type]


def naive(model: onnx.ModelProto) -> None:
    """Causal attention with the lengths as ONNX has it, of which the parser drops the lengths."""
    for node in nodes(model, "Attention"):
        del node.input[3:]
        node.input.extend(["", "", "", "start"])
        for attribute in node.attribute:
            if attribute.name == "is_causal":
                attribute.i = 1


def unmasked(model: onnx.ModelProto) -> None:
    for node in nodes(model, "Attention"):
        del node.input[3:]


def read_twice(model: onnx.ModelProto) -> None:
    """Attention reads the cache as it was before the call's rows were written."""
    nodes(model, "Attention")[0].input[1] = "past_key_0"


def crossed(model: onnx.ModelProto) -> None:
    """The caches of two layers change places."""
    first, second = nodes(model, "TensorScatter")[0], nodes(model, "TensorScatter")[2]
    first.input[0], second.input[0] = second.input[0], first.input[0]


def renamed(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "tokens"
    for node in model.graph.node:
        node.input[:] = ["tokens" if name == "input_ids" else name for name in node.input]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (naive, r"layer \S+: its attention is \w+, which is right for the first call only"),
        (unmasked, r"layer \S+: its attention has no mask"),
        (read_twice, r"layer .+: it reads 'past_key_0', which \S+ overwrites"),
        (crossed, r"layer \S+: it writes 'present_key_\d', expected the output that aliases 'past_key_\d'"),
        (renamed, "the network has the input 'input_ids' as None, its contract promises"),
    ],
)
def test_the_audit_refuses_a_network_that_would_answer_wrongly(half: Path, damage: Any, said: str) -> None:
    bundle = Bundle.open(half)
    graph = bundle.graph("target")
    sound = ir.to_proto(prepare(graph, VERIFY)[0])
    audit(trt, parse(sound, graph)[0], bundle.target.contract, VERIFY.sizes)
    damage(sound)
    kept = parse(sound, graph)
    with pytest.raises(ExportError, match=said):
        audit(trt, kept[0], bundle.target.contract, VERIFY.sizes)


def test_the_audit_refuses_other_sizes_and_attention_that_may_be_taken_apart(half: Path) -> None:
    bundle = Bundle.open(half)
    graph = bundle.graph("target")
    kept = parse(ir.to_proto(prepare(graph, VERIFY)[0]), graph)
    with pytest.raises(ExportError, match=r"the network has the input 'ancestors' as .*5.*, its contract promises .*4"):
        audit(trt, kept[0], bundle.target.contract, VERIFY.sizes | {"width": 4})
    for index in range(kept[0].num_layers):
        layer = kept[0].get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
    with pytest.raises(ExportError, match="may be taken apart, expected a fused kernel"):
        audit(trt, kept[0], bundle.target.contract, VERIFY.sizes)
    audit(trt, kept[0], bundle.target.contract, VERIFY.sizes, unfused=True)


# Every family, exhaustively.

# Between them these have every form of layer that any family has. Another family with one of its own is compiled, too.
OF_ALL_FORMS = """
apertus bart beam cohere cohere_compass_text ctrl diffllama ernie4_5_moe flint gemma2 gpt_neox gpt_oss
granitemoehybrid helium hunyuan_v1_dense kimi_linear laguna lfm2 llama minimax_m3_vl_text ministral3
modernbert-decoder nanochat olmo opt persimmon phi phimoe qwen3_next t5 vaultgemma whisper
"""
COMPILED = OF_ALL_FORMS.split()
CRASHES = ("falcon_h1",)  # tensorrt_rtx 1.7.1 dies over its graph at width 2


def keys(bundle: Bundle, **settings: Any) -> list[PlanKey]:
    """The shapes of all roles; a draft's plans would be those of this same graph."""
    shapes = sorted({(role.width, role.rows, role.batch) for role in roles(options(**settings), ["draft"])})
    assert len(shapes) == 4, "verify, first, decode, prefill"
    unfused = any(state.shape[1] < 16 for state in bundle.target.contract.of_kind(TOKEN)[:1])
    asked = replace(VERIFY, unfused_attention=unfused, source=bundle.longest_source("target"))
    return [replace(asked, width=width, rows=rows, batch=batch) for width, rows, batch in shapes]


def compile_all_roles(bundle: Bundle, folder: Path, **settings: Any) -> None:
    """In this process, which starts faster than one of its own."""
    contract, graph, compiler = bundle.target.contract, bundle.graph("target"), Compiler("tensorrt-rtx")
    for key, capability in product(keys(bundle, **settings), ["8.0", "8.9"]):
        plan = compiler.compile(graph, contract, replace(key, compute_capability=capability), folder / "timings")
        assert len(bytes(plan)) > 10_000


def in_half_precision(kind: str, folder: Path) -> Bundle:
    make = tiny_with_source if kind in WITH_SOURCES else tiny_checkpoint
    checkpoint = make(kind, folder / "checkpoint")
    dtype = "bfloat16" if kind in ("llama", "gemma2") else "float16"
    return Bundle.open(export_pair(checkpoint, folder / "bundle", max_length=64, dtype=dtype).bundle)


def forms_of(kind: str, folder: Path) -> set[str]:
    """The forms of all plans of a family, each parsed and audited; worked out once in a run of the tests."""
    kept = bundles.exports / f"{kind}.forms"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            bundle, compiler = in_half_precision(kind, folder), Compiler("tensorrt-rtx")
            contract, graph = bundle.target.contract, bundle.graph("target")
            found = (forms_of_plan(compiler, graph, contract, key) for key in keys(bundle, prefill_width=32))
            kept.write_text("\n".join(sorted(set().union(*found))))
    return set(kept.read_text().splitlines())


def not_compiled(kind: str, folder: Path, compiled: Sequence[str] = COMPILED) -> set[str]:
    """The forms of a family that none of those that are compiled has."""
    covered = (forms_of(other, folder / other) for other in compiled)
    return forms_of(kind, folder / kind).difference(*covered)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.exhaustive if kind in COMPILED else pytest.mark.plans)
        for kind in WORKS
        if kind not in CRASHES
    ],
)
def test_every_family_compiles_in_half_precision(tmp_path: Path, kind: str) -> None:
    """All are parsed and audited. Those are compiled that have forms of layers which no other has that is compiled."""
    forms_of(kind, tmp_path / "forms")
    if kind in COMPILED or not_compiled(kind, tmp_path):
        compile_all_roles(in_half_precision(kind, tmp_path), tmp_path, prefill_width=32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", CRASHES)
def test_a_family_over_which_the_library_dies_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    path = in_half_precision(kind, tmp_path).path
    with pytest.raises(ExportError, match=r"crashed while compiling the target graph at width 2 for 8\.0"):
        build_plans(path, options(draft_length=1, batch=(1, 8), compute_capabilities=["8.0"], prefill_width=0))
    build_plans(path, options(draft_length=4, batch=(1, 8), compute_capabilities=["8.0"], prefill_width=32))


@pytest.mark.plans
def test_a_family_with_a_form_of_its_own_is_noticed(tmp_path: Path) -> None:
    assert not not_compiled("diffllama", tmp_path)
    assert not_compiled("diffllama", tmp_path, [kind for kind in COMPILED if kind != "diffllama"])


def other_operator(model: onnx.ModelProto) -> None:
    nodes(model, "Sigmoid")[0].op_type = "Tanh"


def mask_of_floats(model: onnx.ModelProto) -> None:
    [attention] = nodes(model, "Attention")[:1]
    place = list(model.graph.node).index(attention)
    cast = onnx.helper.make_node("Cast", [attention.input[3]], ["as floats"], to=onnx.TensorProto.FLOAT16)
    model.graph.node.insert(place, cast)
    attention.input[3] = "as floats"


@pytest.mark.parametrize("change", [other_operator, mask_of_floats, unmasked])
def test_a_layer_of_another_form_is_seen_among_those_of_a_network(half: Path, change: Any) -> None:
    graph = Bundle.open(half).graph("target")
    model = ir.to_proto(prepare(graph, replace(VERIFY, width=1, rows=1))[0])
    before = forms(parse(model, graph)[0])
    assert forms(parse(model, graph)[0]) == before
    change(model)
    assert forms(parse(model, graph)[0]) - before


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "weights", "batch"),
    [
        ("float32", "none", (1, 1)),
        ("float16", "int8", (1, 1)),
        ("float16", "int4", (1, 1)),
        ("float16", "none", (1, 8)),
    ],
)
def test_other_weights_and_batches_compile(tmp_path: Path, dtype: str, weights: str, batch: tuple[int, int]) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    pair = export_pair(checkpoint, tmp_path / "bundle", max_length=64, dtype=dtype, weights=Quantisation(weights))
    compile_all_roles(Bundle.open(pair.bundle), tmp_path, batch=batch)
