"""Count the kernels that a round of a setting runs on a GPU, as torch's profiler sees them."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import profile, supported_activities

from ...runtime import Decoder, SamplingParams
from ...runtime.requests.prompts import Prompt
from ..timing.time_rounds import Setting, total


def kernels_per_round(
    decoder: Decoder, prompts: Sequence[Prompt], params: Sequence[SamplingParams], setting: Setting
) -> float:
    """Decode prompts once more, and return what the device ran over the rounds, the reading of prompts included."""
    asked: dict[str, Any] = {"draft_length": setting.length, "drafter": setting.drafter}
    able: Any = supported_activities  # torch leaves it untyped
    with profile(activities=able()) as seen:
        outputs = decoder.generate(prompts, params, **asked)
    rounds = max(total([output.speculation]).rounds for output in outputs)
    return kernels_of(seen.key_averages()) / max(1, rounds)


def kernels_of(events: Iterable[Any]) -> int:
    """Return how many kernels, copies and fills the device ran."""
    return sum(one.count for one in events if one.device_type != DeviceType.CPU and not one.is_user_annotation)
