"""What the profiler of a GPU has seen is counted: kernels, copies and fills, not what the host did."""

from types import SimpleNamespace

from torch._C._autograd import DeviceType
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.measuring.kernels import kernels_of, kernels_per_round
from trt_spec.tools.timing.time_rounds import Setting

from ...kit.bundles import Pair


def test_only_what_the_device_ran_counts() -> None:
    on_gpu, on_cpu = DeviceType.CUDA, DeviceType.CPU  # the operation that launches kernels has a row of its own
    events = [
        SimpleNamespace(count=3, device_type=on_gpu, is_user_annotation=False),
        SimpleNamespace(count=3, device_type=on_cpu, is_user_annotation=False),
        SimpleNamespace(count=1, device_type=on_gpu, is_user_annotation=True),
    ]
    assert kernels_of(events) == 3


def test_where_there_is_no_gpu_a_round_runs_no_kernel(llama: Pair) -> None:
    params = [SamplingParams(max_new_tokens=8, ignore_eos=True)]
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        assert kernels_per_round(decoder, ["def main"], params, Setting(2, "model")) == 0
