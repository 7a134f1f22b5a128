"""Predict what steps and rounds take on a GPU that is not there, from the kernels that they launch.

A kernel takes the time of its kind, or that in which the GPU reads its bytes if that is longer. The times are those of
the kernels of one layer of a 3B model on an H200. Four numbers beside them (`PRODUCT_US`, `ROWS_US`, `SHARE` and
`BETWEEN_US`) were chosen by the times of its rounds, which are in `gpu_figures.json`. Small kernels take much the same
on other GPUs. What this finds is a prediction, and is to be called so.
"""

from collections.abc import Iterable, Mapping

from .gpu_launches import ATTENTION, FILL, NORM, POINTWISE, PRODUCT, REDUCTION, WRITE, Launch
from .gpus import Gpu

BETWEEN_US = 0.2  # from a kernel of a replayed graph to the next: the round took 1.05 of its 856 kernels
KERNEL_US: Mapping[str, float] = {  # the time of a small one, which does not depend on what it does
    ATTENTION: 7.1,
    WRITE: 4.5,
    REDUCTION: 4.75,
    POINTWISE: 1.47,
    FILL: 0.8,
}
NORM_US, BLOCK_BANDWIDTH = 2.5, 8.2e9  # one block reads a row: 4.75 where it has 3,072 numbers
PRODUCT_US = 2.0  # of a product, beside the reading of its matrix
ROWS_US = 1.5  # more, where it has several rows
SHARE = 0.9  # of the bandwidth with which a product reads its matrix
FUSED_US: Mapping[str, float] = {  # estimates, of which no GPU gave any: by a word in the name of an operator of ours
    "attention": 3.5,  # each of two kernels, which together take what cuDNN's one takes
    "norm": 2.5,
    "rotate": 2.5,
    "write": 2.5,
    "gate": 1.5,
}
OTHER_FUSED_US = 2.5
OWN_PRODUCT = "trt_spec::product"  # an estimate as well: as torch's of one row, whatever its rows and what is beside it


def kernel_us(launch: Launch, gpu: Gpu) -> float:
    """Return the microseconds of a kernel."""
    if launch.kind in (PRODUCT, OWN_PRODUCT):
        begin = PRODUCT_US + (ROWS_US if launch.rows > 1 else 0.0)
        return begin + 1e6 * launch.bytes / (SHARE * gpu.bandwidth)
    if launch.kind == NORM:
        return max(NORM_US + 1e6 * launch.bytes / launch.rows / BLOCK_BANDWIDTH, 1e6 * launch.bytes / gpu.bandwidth)
    if (least := KERNEL_US.get(launch.kind)) is not None:
        return max(least, 1e6 * launch.bytes / gpu.bandwidth)
    least = next((us for word, us in FUSED_US.items() if word in launch.kind), OTHER_FUSED_US)
    return max(least, 1e6 * launch.bytes / (SHARE * gpu.bandwidth))


def predicted_ms(launches: Iterable[Launch], gpu: Gpu) -> float:
    """Return the milliseconds of a recorded step or round."""
    return sum(kernel_us(launch, gpu) + BETWEEN_US for launch in launches) / 1e3
