"""Keep the libraries' own progress bars, hints and known warnings out of our output while they work."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

KNOWN_WARNINGS = (
    r".*LeafSpec.* is deprecated",  # torch.export uses what torch.utils deprecates
    r".*The axis name: .* will not be used",  # one axis name on several inputs is what we mean
)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    registration = logging.getLogger("torch.onnx._internal.exporter._registration")  # torchvision is not needed
    levels = registration.level, transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    registration.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            for message in KNOWN_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        registration.setLevel(levels[0])
        transformers_logging.set_verbosity(levels[1])
        enable_progress_bars()
        if bars:
            transformers_logging.enable_progress_bar()
