"""Bundles whose targets are in shards."""

import shutil
from dataclasses import replace
from pathlib import Path

from trt_spec.engines import Bundle
from trt_spec.export.parallel.split import Report, split


def in_shards(bundle: Path, out: Path, shards: int, *, exact: bool = True) -> Report:
    """Write the bundle with its target in so many shards; one has it whole, with sums in float64 like the others."""
    shutil.copytree(bundle, out)
    opened = Bundle.read(out)
    contract, report = split(out / "target", opened.target.contract, shards, exact=exact)
    replace(opened, models=opened.models | {"target": replace(opened.target, contract=contract)}).save()
    return report
