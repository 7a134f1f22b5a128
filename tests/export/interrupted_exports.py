"""Exports a checkpoint again and again, and interrupts it at random moments of each stage.

Prints for each time the stage, the moment, the signal, the exit code, what is there afterwards, whether the signal was
sent before the export had ended, and the last line that was said.
Everything is loaded and compiled before, and each export runs in a process that begins there.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path
from time import process_time
from unittest.mock import patch

from trt_spec.tools.commands.export_models import main

SAY = "trt_spec.tools.console.say"


def stages(arguments: list[str]) -> dict[str, float]:
    """The stages of an export and the seconds of computing that each takes."""
    begun: dict[str, float] = {}
    with patch(SAY, lambda line: begun.setdefault(line[11:], process_time())):
        assert main(arguments) == 0
    ends = [*list(begun.values())[1:], process_time()]
    return {stage: end - begin for (stage, begin), end in zip(begun.items(), ends, strict=True)}


def interrupted(arguments: list[str], stage: str, moment: float, number: int, said: Path) -> int:
    """The exit code of an export that gets the signal after so many seconds of computing in a stage."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    lines = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(lines, 1)
    os.dup2(lines, 2)

    def say(line: str) -> None:
        if line[11:] == stage:
            signal.setitimer(signal.ITIMER_PROF, max(1e-6, moment))

    def send(*_: object) -> None:
        os.write(lines, b"sent\n")
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPROF, send)
    code = 1
    try:
        with patch(SAY, say):
            code = main(arguments)
            sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    folder, moments, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(1)
    arguments = ["--target", str(folder / "checkpoint"), "--out", str(folder / "made" / "bundle")]
    with open(os.devnull, "w") as nowhere, patch("sys.stdout", nowhere):
        stages(arguments)  # which loads and compiles
        computing = stages(arguments)
    for stage, seconds in computing.items():
        for turn in range(moments):
            for one in sorted((folder / "made").rglob("*"), reverse=True):
                one.rmdir() if one.is_dir() else one.unlink()
            number, moment = (signal.SIGINT, signal.SIGTERM)[turn % 2], chance.uniform(0, seconds)
            code = interrupted(arguments, stage, moment, number, folder / "said")
            there = sorted(one.name for one in (folder / "made").iterdir())
            said = (folder / "said").read_text().splitlines()
            print(json.dumps([stage, moment, number, code, there, "sent" in said, said[-1:]]), flush=True)
