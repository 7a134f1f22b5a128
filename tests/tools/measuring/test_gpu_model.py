"""What a GPU would launch is counted where there is none, and the times of an H200 are predicted from such counts."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from trt_spec.engines import Bundle, RequestError
from trt_spec.export import export_bundle
from trt_spec.tools.measuring.gpu_figures import compare, figures, launches_of
from trt_spec.tools.measuring.gpu_launches import (
    ATTENTION,
    FILL,
    NORM,
    POINTWISE,
    PRODUCT,
    REDUCTION,
    WRITE,
    Launch,
    Launches,
)
from trt_spec.tools.measuring.gpu_model import kernel_us, predicted_ms
from trt_spec.tools.measuring.gpu_steps import Counted, WeightlessEngine, count_round, count_step
from trt_spec.tools.measuring.gpus import GPUS, gpu_of

from ...kit.bundles import Pair
from ...kit.models import tiny_llama
from ..conftest import assert_refused

KERNELS_OF_A_LAYER = 7  # of a Llama, one token of one row
KERNELS_BESIDE_STEPS = {0: 6, 3: 13}  # of a greedy round by K
BYTES_OF_A_LAYER = 120_152  # its weights and the part of its cache that is read are 114,944 of them


def test_the_figures_of_the_h200_are_predicted_within_fifteen_per_cent() -> None:
    """From the kernels of the graphs that were measured; the table of their times is of one layer of one model."""
    found = compare()
    assert len(found["ms"]) == 6
    for each in found.values():
        for one in each:
            assert abs(one.error) < 0.15, one
    assert all(abs(one.error) < 0.05 for one in found["kernels"])
    assert abs(sum(one.error for one in found["ms"]) / 6) < 0.06, "too high as often as too low"


def test_a_layer_of_the_measured_graph_has_the_kernels_that_were_seen_in_it() -> None:
    """28 layers of 28 to 30 kernels that took 114 us, of which products took 65."""
    launches, gpu = launches_of("3B, K 0"), GPUS["H200"]
    assert 28 <= len(launches) / 28 <= 30.6
    products = sum(kernel_us(one, gpu) for one in launches if one.kind == PRODUCT)
    assert products / 28 == pytest.approx(65, rel=0.1)
    assert sum(kernel_us(one, gpu) for one in launches) / 28 == pytest.approx(114, rel=0.1)
    assert {one["launches"] for part in ("times", "kernels") for one in figures()[part]} <= figures()["launches"].keys()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Three layers: what lies between two of them belongs to a layer."""
    folder = tmp_path_factory.mktemp("deep")
    checkpoint = tiny_llama(folder / "checkpoint", num_hidden_layers=3)
    export_bundle(checkpoint, folder / "bundle", check=False)
    return Bundle.open(folder / "bundle")


def test_a_layer_launches_no_more_kernels_than_it_did(deep: Bundle) -> None:
    engine = WeightlessEngine(deep, "target")
    found = count_step(engine, 1, 1)
    assert found.kernels_per_layer is not None
    assert found.kernels_per_layer <= KERNELS_OF_A_LAYER
    kinds = Counter(one.kind for one in layer_of(found))
    ours = ("attention", "attention", "rotate_write", *["product"] * 4)
    assert kinds == Counter(f"trt_spec::{name}" for name in ours)


def test_a_layer_reads_and_writes_no_more_bytes_than_it_did(deep: Bundle) -> None:
    engine = WeightlessEngine(deep, "target")
    launches = layer_of(count_step(engine, 1, 1))
    hidden, mlp, heads, entries = 32, 64, 16 * (4 + 2 + 2), 256
    weights = 4 * (hidden * heads + 16 * 4 * hidden + 3 * hidden * mlp + 2 * hidden)
    cache = 4 * 2 * 16 * 2 * entries
    assert weights + cache < sum(one.bytes for one in launches) <= BYTES_OF_A_LAYER
    assert weights < sum(one.bytes for one in launches if one.kind == "trt_spec::product") < 1.1 * weights


def layer_of(found: Counted) -> tuple[Launch, ...]:
    return found.launches[found.begins[-2] : found.begins[-1]]


def test_a_round_launches_its_steps_and_what_decides(llama: Pair) -> None:
    bundle = Bundle.open(llama.bundle)
    engines = {name: WeightlessEngine(bundle, name) for name in bundle.names}
    steps = [count_step(engines["target"], 2, 4), count_step(engines["draft"], 2, 2)]
    steps += [count_step(engines["draft"], 2, 1)] * 2
    beside = len(count_round(bundle, engines, 2, 3).launches) - sum(len(one.launches) for one in steps)
    assert 10 < beside <= KERNELS_BESIDE_STEPS[3]
    plain = len(count_round(bundle, engines, 2, 0).launches) - len(count_step(engines["target"], 2, 1).launches)
    assert 0 < plain <= KERNELS_BESIDE_STEPS[0]


def counted(run, own=None) -> list[str]:
    launches = Launches(own or {})
    with torch.no_grad(), launches.counted():
        run()
    return [one.kind for one in launches.found]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: empty(2, 3, 4).permute(0, 2, 1).unsqueeze(1)[:, :, 1:], []),
        (lambda: empty(1, 1, 64).reshape(1, 8, 8), []),
        (lambda: empty(4, 8, 8).transpose(1, 2).reshape(32, 8), [POINTWISE]),
        (lambda: torch.matmul(empty(1, 1, 512), empty(512, 512)), [PRODUCT]),
        (lambda: torch.matmul(empty(1, 1, 2048), empty(2048, 8192)), [PRODUCT]),
        (lambda: torch.matmul(empty(1, 1, 2048), empty(2048, 2048)), [PRODUCT, POINTWISE]),
        (lambda: torch.matmul(empty(1, 1, 8192), empty(8192, 2048)), [PRODUCT, POINTWISE, FILL]),
        (lambda: F.rms_norm(empty(2, 8), (8,), empty(8)), [NORM]),
        (lambda: F.scaled_dot_product_attention(*[empty(1, 2, 3, 4)] * 3), [ATTENTION]),
        (lambda: empty(3, 5).roll(1, -1), [POINTWISE]),
        (lambda: empty(5, 3).t().roll(1, -1), [POINTWISE] * 2),
        (lambda: empty(2, 9).argmax(-1), [REDUCTION]),
        (lambda: torch.zeros(3, device="meta"), [FILL]),
        (
            lambda: empty(2, 3, 9, 4).index_put_(
                (empty(2, 1, 1, dtype=torch.int64), empty(3, 1, dtype=torch.int64), empty(2, 1, 5, dtype=torch.int64)),
                empty(2, 3, 5, 4),
            ),
            [POINTWISE] * 3 + [WRITE],
        ),
    ],
)
def test_operations_launch_what_the_table_says(run, expected: list[str]) -> None:
    assert counted(run) == expected


def test_an_operator_of_our_own_launches_what_its_declaration_says() -> None:
    library = torch.library.Library("trt_spec", "FRAGMENT")
    library.define("counted_here(Tensor x) -> Tensor")
    library.impl("counted_here", lambda x: x.exp().log(), "Meta")
    try:
        run = lambda: torch.ops.trt_spec.counted_here(empty(1 << 20))  # noqa: E731
        assert counted(run, {"counted_here": 2}) == ["trt_spec::counted_here"] * 2
        with pytest.raises(KeyError, match="counted_here"):
            counted(run)
    finally:
        library._destroy()


def test_a_fused_kernel_takes_its_estimate_or_as_long_as_its_bytes() -> None:
    gpu = GPUS["H200"]
    assert kernel_us(Launch("trt_spec::add_norm", 1000), gpu) == 2.5
    assert kernel_us(Launch("trt_spec::gate", 1000), gpu) == 1.5
    assert kernel_us(Launch("trt_spec::product", 43 << 20), gpu) == kernel_us(Launch(PRODUCT, 43 << 20), gpu)
    assert kernel_us(Launch("trt_spec::attention", 1000), gpu) == 3.5
    assert kernel_us(Launch("trt_spec::attention", 43 << 20), gpu) == pytest.approx((43 << 20) / 0.9 / 4.3e6)


def test_a_gpu_is_named_or_said_to_read_so_fast() -> None:
    assert gpu_of("h100") == GPUS["H100"]
    assert gpu_of("1200").bandwidth == 1.2e12
    for wrong in ("T1000", "0", "-3", "nan", "inf"):
        with pytest.raises(RequestError, match="expected H200, H100, A100, L40S, or how many gigabytes"):
            gpu_of(wrong)
    large = [Launch(PRODUCT, 10**9)]
    assert predicted_ms(large, gpu_of("1000")) == pytest.approx(1 / 0.9, rel=0.01)


def test_inspect_prints_a_prediction_and_calls_it_one(run, llama: Pair, tmp_path: Path) -> None:
    result = run("inspect", llama.bundle, "--gpu")
    assert result.code == 0, result.err
    assert "a prediction, which no GPU has given: engine torch on H200 that reads 4,300 GB/s, batch 1" in result.out
    assert "attention takes up to" in result.out
    assert "calibrated on an NVIDIA H200 (compute capability 9.0" in result.out
    found = json.loads(run("inspect", llama.bundle, "--gpu", "L40S", "--batch", 4, "--json").out)["prediction"]
    assert [(one["model"], one["width"]) for one in found["steps"]] == [("target", 1), ("target", 5), ("draft", 1)]
    assert [one["draft_length"] for one in found["rounds"]] == [0, 4]
    plain, drafted = found["rounds"]
    assert plain["most_tokens_per_second"] == pytest.approx(4e3 / plain["ms"])
    assert drafted["most_tokens_per_second"] == pytest.approx(5 * 4e3 / drafted["ms"])
    assert 0 < found["step_bytes"] < 128 << 20
    assert all(0 < one["bandwidth_share"] < 1 for one in found["steps"])
    assert "prediction" not in json.loads(run("inspect", llama.bundle, "--json").out)
    assert_refused(run("inspect", llama.bundle, "--gpu", "fast"), "--gpu is 'fast', expected H200, H100")
