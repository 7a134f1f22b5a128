"""What the profiler of a GPU has seen is counted: kernels, copies and fills, not what the host did."""

from types import SimpleNamespace

from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.measuring.kernels import kernels_of, kernels_per_round
from trt_spec.tools.measuring.time_rounds import Setting

from ...bundles import Pair


def test_only_what_the_device_ran_counts() -> None:
    events = [SimpleNamespace(count=3, self_device_time_total=7.5), SimpleNamespace(count=9, self_device_time_total=0)]
    assert kernels_of(events) == 3


def test_where_there_is_no_gpu_a_round_runs_no_kernel(llama: Pair) -> None:
    params = [SamplingParams(max_new_tokens=8, ignore_eos=True)]
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        assert kernels_per_round(decoder, ["def main"], params, Setting(2, "model")) == 0
