"""The processes that torchrun starts: the first runs the command, and each other one a shard of its target."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from ...engines import Bundle, EngineError


def rank_by_torchrun() -> int:
    """Return which process of torchrun's this is; 0 if it has not started any."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def follow(arguments: argparse.Namespace, rank: int) -> NoReturn:
    """Run a shard of the bundle that the command names, until the first process ends."""
    named = getattr(arguments, "model", None) or getattr(arguments, "bundle", None)
    if named is None or not (Path(named) / "manifest.json").exists():
        raise EngineError("torchrun starts one process for each shard of a bundle, and this command names no bundle")
    if rank >= (shards := Bundle.read(Path(named)).target.contract.shards):
        raise EngineError(f"torchrun has started process {rank}, {named} is in {shards} shards; start one for each")
    if (device := getattr(arguments, "device", None)) is None:
        raise EngineError("torchrun starts one process for each shard, and this command runs none; run it by itself")
    from ...engines.torch.parallel.follower import follow as follow_first

    follow_first(Path(named), rank, device, compiled=arguments.engine == "torch-compiled")
