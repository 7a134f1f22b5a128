"""Engine auto: the engines that `trt-spec tune --engine auto` found fastest for a bundle on this machine."""

import json
from collections.abc import Mapping
from pathlib import Path

from ...engines import ENGINES, Bundle, BundleError
from ...engines.bundle import COSTS
from ...engines.bundle.whole_files import write_whole
from ..lengths.costs import machine_name, model_identities

AUTO_ENGINE = "auto"
DEFAULT_ENGINE = next(iter(ENGINES))


def resolve(bundle: Bundle, engine: str, device: str, max_batch: int) -> str:
    """Return the name of the engines to open: for auto the measured ones, or the default where none were measured."""
    return (read_choice(bundle, device, max_batch) or DEFAULT_ENGINE) if engine == AUTO_ENGINE else engine


def read_choice(bundle: Bundle, device: str, max_batch: int) -> str | None:
    """Return the engines that were fastest up to the smallest measured batch that holds this one, or up to the largest.

    None if nothing was measured, or only another machine or other graphs.
    """
    path = choice_file(bundle.path, device)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        engines = {int(batch): str(engine) for batch, engine in fields["engines"].items()}
        measured, largest = (fields["machine"], fields["models"]), max(engines)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        mend = f"trt-spec tune {bundle.path} --engine auto --device {device}"
        raise BundleError(f"{path} does not name engines ({error}); run {mend} again") from error
    engine = engines[min((batch for batch in engines if batch >= max_batch), default=largest)]
    return engine if measured == (machine_name(device), model_identities(bundle)) else None


def save_choice(bundle: Bundle, device: str, engines: Mapping[int, str]) -> Path:
    """Keep which engines are fastest up to each batch."""
    path = choice_file(bundle.path, device)
    fields = {"engines": dict(engines), "machine": machine_name(device), "models": model_identities(bundle)}
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, (json.dumps(fields, indent=1) + "\n").encode())
    except OSError as error:
        raise BundleError(f"{path} cannot be written ({error.strerror}); make room or give access") from error
    return path


def choice_file(bundle: Path, device: str) -> Path:
    return bundle / COSTS / f"engine-{device.replace(':', '-')}.json"
