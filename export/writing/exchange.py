"""Lets two folders change places in one step of the system, so that neither name is missing at any moment."""

import ctypes
import os
from pathlib import Path

HERE = -100  # AT_FDCWD: relative paths begin where the program runs
EXCHANGE = 2  # RENAME_EXCHANGE


def exchanged(one: Path, other: Path) -> bool:
    """Let two folders change places; return False, and change nothing, where one is missing or the system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or a C library of before 2018
        return False
    code: int = rename(HERE, os.fsencode(one), HERE, os.fsencode(other), ctypes.c_uint(EXCHANGE))
    return code == 0
