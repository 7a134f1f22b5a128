"""The GPUs whose times can be predicted, by how fast they read their memory."""

from dataclasses import dataclass

from ...engines.errors import RequestError


@dataclass(frozen=True)
class Gpu:
    name: str
    bandwidth: float  # bytes a second, as reading measures it

    def __str__(self) -> str:
        return f"{self.name}, {self.bandwidth / 1e9:,.0f} GB/s"


MEASURED_OF_NAMED = 0.9  # of the bandwidth in a data sheet: an H200 reads 4.3 of 4.8 TB/s
GPUS = {
    "H200": Gpu("H200", 4.3e12),
    **{
        name: Gpu(name, MEASURED_OF_NAMED * named)
        for name, named in (("H100", 3.35e12), ("A100", 2.04e12), ("L40S", 0.864e12))
    },
}


def gpu_of(text: str) -> Gpu:
    """Return the GPU of a name, or one that reads so many gigabytes a second."""
    if text.upper() in GPUS:
        return GPUS[text.upper()]
    try:
        bandwidth = 1e9 * float(text)
    except ValueError:
        bandwidth = 0.0
    if not 1e9 <= bandwidth < 1e15:
        raise RequestError(
            f"--gpu is {text!r}, expected {', '.join(GPUS)}, or how many gigabytes a second the GPU reads"
        )
    return Gpu("a GPU", bandwidth)
