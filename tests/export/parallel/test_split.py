"""An export in shards says what each holds, checks them together, and keeps all that a whole one has."""

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch.distributed as dist
from trt_spec.engines import Bundle, BundleError, ExportError, blank_cache, blank_step
from trt_spec.engines.torch.engine import TorchEngine
from trt_spec.engines.torch.parallel.picking import picking
from trt_spec.export import export_bundle
from trt_spec.export.checking.check_shards import check_shards, whole_logits
from trt_spec.export.parallel.shard import Shard
from trt_spec.tools.commands.export_models import main

from ...kit.bundles import Pair
from ...kit.families import tiny_checkpoint
from ...kit.seeing_models import seeing
from ...kit.shards import in_shards
from ...kit.source_models import tiny_with_source

# One of each form: heads of keys that are shared, experts, latent attention, recurrent layers, learned positions,
# merged projections, a bias for each head, pairs of columns, a norm over all heads, a norm that folds heads with rows,
# decays of low rank, decays that are constants, matrices that are added, queries beside keys beside values, one group
# of keys for all recurrent heads with a mean over all.
FORMS = (
    *("gemma2", "qwen3_moe", "deepseek_v3", "bamba", "gpt2", "phi3", "bloom", "gpt_oss", "olmo2"),
    *("qwen3_next", "kimi_linear", "minimax", "zamba2", "mpt", "mamba2"),
)
SETTINGS: dict[str, dict[str, Any]] = {"kimi_linear": {"linear_num_heads": 4}, "mamba2": {"n_groups": 1}}
# Gates of experts, the small matrix of a pair, and one beside the residual.
SMALL = (
    *("gate.weight", "router.", "q_a_proj.", "kv_a_proj_with_mqa.", "f_a_proj.", "g_a_proj.", "_adapter_list."),
    "layers.#.linear.",
)
TEXT = [5, 9, 17, 5, 9, 20, 33, 12, 8, 2, 44]


def test_the_command_writes_shards_that_were_checked_together(
    llama: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", str(llama.checkpoint), "--out", str(tmp_path / "bundle"), "--tensor-parallel", "2"]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "each of 2 shards holds 50.0% of the target's weights, and a call sums 5 times" in said
    assert "the 2 shards together: the worst logit is off by" in said
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.target.contract.shards == 2
    (bundle.path / "target" / "shard1" / "weights.bin").unlink()
    with pytest.raises(BundleError, match=r"shard1/weights\.bin"):
        Bundle.open(bundle.path)


@pytest.mark.parametrize(("name", "number", "least"), [("shards", 0, 1), ("adapters", -1, 0), ("adapter_rank", 0, 1)])
def test_numbers_that_cannot_be_are_refused_before_anything_is_read(
    name: str, number: int, least: int, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"^{name} is {number}, expected {least} or more$"):
        export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", **{name: number})
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "shards"), [(family, 2) for family in FORMS] + [("llama", 4), ("qwen3_moe", 4)])
def test_shards_of_every_form_compute_what_the_graph_does(family: str, shards: int, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "checkpoint", **SETTINGS.get(family, {}))
    export_bundle(checkpoint, tmp_path / "bundle", check=False)
    graph = tmp_path / "bundle" / "target" / "model.onnx"
    whole = Bundle.read(tmp_path / "bundle").target.contract
    wanted = whole_logits(graph, whole, TEXT)
    report = in_shards(tmp_path / "bundle", tmp_path / "split", shards, exact=False)
    assert report.sums >= 3
    assert [name for name in report.whole_for if not any(small in name for small in SMALL)] == []
    contract = Bundle.read(tmp_path / "split").target.contract
    assert check_shards(tmp_path / "split" / "target" / "model.onnx", contract, whole, TEXT, wanted) < 1e-4


def test_what_a_number_of_shards_does_not_divide_is_said_to_be_whole(llama: Pair, tmp_path: Path) -> None:
    report = in_shards(llama.bundle, tmp_path / "bundle", 3, exact=False)
    config = llama.reference.config
    kind = f"model.layers.#.mlp.gate_proj.weight.T {[config.hidden_size, config.intermediate_size]}"
    assert report.whole_for[kind] == f"3 shards do not divide {config.intermediate_size}"
    assert len(report.whole_for) == 6, "all but the embedding"


def test_shards_that_lack_a_sum_are_refused(llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Shard._sum
    left_out = {"linear_6"}
    monkeypatch.setattr(Shard, "_sum", lambda self, name: name in left_out or whole(self, name))
    with pytest.raises(ExportError, match="the 2 shards of the target do not compute what the whole graph does"):
        export_bundle(llama.checkpoint, tmp_path / "bundle", shards=2)
    assert not (tmp_path / "bundle").exists()


def test_shards_that_are_wrong_for_a_second_row_are_refused(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = Shard._change

    def first_row_alone(self: Shard, node: ir.Node) -> None:
        change(self, node)
        for place, given in enumerate(node.inputs):
            if given is not None and given.name == "linear_6.AllReduce":
                self._take_first(node, place, 0, 1)

    monkeypatch.setattr(Shard, "_change", first_row_alone)
    with pytest.raises(ExportError, match="the 2 shards of the target do not compute what the whole graph does"):
        export_bundle(llama.checkpoint, tmp_path / "bundle", shards=2)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.exhaustive
def test_an_export_in_shards_may_have_adapters_and_a_cache_in_eight_bits(llama: Pair, tmp_path: Path) -> None:
    options = {"shards": 2, "adapters": 2, "adapter_rank": 4, "cache": "int8"}
    report = export_bundle(llama.checkpoint, tmp_path / "bundle", **options)
    assert "the 2 shards together" in report.notes[-1]
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.target.contract.rounded_to == "int8"
    assert {len(one.input_parts) + len(one.output_parts) for one in bundle.target.contract.adapters.products} == {1}
    (bundle.path / "target" / "shard1" / "adapters.model.onnx").unlink()
    with pytest.raises(BundleError, match=r"shard1/adapters\.model\.onnx"):
        Bundle.open(bundle.path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["llava", "whisper"])
def test_an_export_in_shards_may_see_or_hear(kind: str, tmp_path: Path) -> None:
    make = seeing if kind == "llava" else tiny_with_source
    make(kind, tmp_path / "checkpoint")
    options = {"images": True} if kind == "llava" else {"max_length": 128}
    report = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", shards=2, **options)
    assert "the 2 shards together" in report.notes[-1]
    assert Bundle.open(tmp_path / "bundle").target.contract.shards == 2


def test_a_call_sends_as_much_as_the_page_says(llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every token: its hidden states twice a layer and once before, and at the end its logits, or 16 bytes."""
    in_shards(llama.bundle, tmp_path / "bundle", 2, exact=False)
    contract, tokens, summed, gathered = Bundle.read(tmp_path / "bundle").target.contract, 5, [], []
    monkeypatch.setattr(dist, "all_reduce", lambda x: summed.append(x.nbytes))
    monkeypatch.setattr(dist, "gather", lambda x, parts, dst: gathered.append(x.nbytes))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    engine = TorchEngine(tmp_path / "bundle" / "target" / "model.onnx", contract, "cpu", compiled=False)
    for one in (engine, picking(engine, 0, contract.vocab_size)):
        blank_step(one, blank_cache(contract, 1, 64), 0, 1, tokens, tokens).run()
    hidden, layers = llama.reference.config.hidden_size, contract.layers
    assert summed == [tokens * hidden * 4] * (2 * layers + 1) * 2
    assert gathered == [tokens * contract.vocab_size // 2 * 4, tokens * 16]
    said = (Path(__file__).parents[3] / "tools" / "docs" / "tensor_parallel.md").read_text(encoding="utf-8")
    sums, each = 2 * 80 + 1, tokens * 8192 * 2 // 2**10  # of 80 layers in bfloat16
    assert f"sums {sums} × {each} KiB, or {sums * each / 2**10:.1f} MiB" in " ".join(said.split())
