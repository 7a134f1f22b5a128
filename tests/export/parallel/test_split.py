"""An export in shards says what each holds, checks them together, and refuses what has none."""

from pathlib import Path

import pytest
from trt_spec.engines import Bundle, BundleError, ExportError
from trt_spec.export import export_bundle
from trt_spec.export.checking.check_shards import check_shards, whole_logits
from trt_spec.export.parallel.shard import Shard
from trt_spec.tools.commands.export_models import main

from ...kit.bundles import Pair
from ...kit.families import tiny_checkpoint
from ...kit.shards import in_shards

# One of each form: heads of keys that are shared, experts, latent attention, recurrent layers, learned positions,
# merged projections, a bias for each head, pairs of columns, a norm over all heads.
FORMS = ("gemma2", "qwen3_moe", "deepseek_v3", "bamba", "gpt2", "phi3", "bloom", "gpt_oss", "olmo2")
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "shards"), [(family, 2) for family in FORMS] + [("llama", 4), ("qwen3_moe", 4)])
def test_shards_of_every_form_compute_what_the_graph_does(family: str, shards: int, tmp_path: Path) -> None:
    export_bundle(tiny_checkpoint(family, tmp_path / "checkpoint"), tmp_path / "bundle", check=False)
    graph = tmp_path / "bundle" / "target" / "model.onnx"
    wanted = whole_logits(graph, Bundle.read(tmp_path / "bundle").target.contract, TEXT)
    report = in_shards(tmp_path / "bundle", tmp_path / "split", shards, exact=False)
    assert report.sums >= 3
    contract = Bundle.read(tmp_path / "split").target.contract
    assert check_shards(tmp_path / "split" / "target" / "model.onnx", contract, TEXT, wanted) < 1e-4


def test_shards_that_lack_a_sum_are_refused(llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Shard._sum
    left_out = {"linear_6"}
    monkeypatch.setattr(Shard, "_sum", lambda self, name: name in left_out or whole(self, name))
    with pytest.raises(ExportError, match="the 2 shards of the target do not compute what the whole graph does"):
        export_bundle(llama.checkpoint, tmp_path / "bundle", shards=2)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"adapters": 2}, "has no room for adapters yet"),
    ],
)
def test_what_has_no_shards_is_refused_before_any_work(llama: Pair, tmp_path: Path, options: dict, why: str) -> None:
    with pytest.raises(ExportError, match=why):
        export_bundle(llama.checkpoint, tmp_path / "bundle", shards=2, **options)
