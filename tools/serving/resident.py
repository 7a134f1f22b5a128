"""What the whole process takes of the machine's memory, and what its allocator keeps without need."""

import ctypes
import os
from pathlib import Path

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def unused_bytes() -> int:
    """Return the bytes that have been freed and may still be resident; 0 where the C library does not say."""
    try:
        tell = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # older than glibc 2.33, or another
        return 0
    tell.restype = _Mallinfo
    return int(tell().fordblks)
