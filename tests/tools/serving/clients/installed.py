"""Makes the environments of clients, and runs what is in them."""

import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from ....kit import bundles

HERE = Path(__file__).parent


def run(*command: object, folder: Path, given: str = "", **variables: object) -> str:
    """Run a command in a folder and return what it prints."""
    done = subprocess.run(
        [str(part) for part in command],
        input=given.encode(),
        capture_output=True,
        cwd=folder,
        env=os.environ | {name: str(value) for name, value in variables.items()},
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")
    return done.stdout.decode()


def environment(name: str, *requirements: str) -> Path:
    """Make a virtual environment, once for all processes of a run, and return the folder of its programs."""
    folder = bundles.exports.parent / name
    with FileLock(folder.with_suffix(".lock")):
        if not (made := folder / "made").exists():
            run(sys.executable, "-m", "venv", folder, folder=folder.parent)
            run("bin/pip", "install", "-q", "--no-compile", *requirements, folder=folder)
            made.touch()
    return folder / "bin"
