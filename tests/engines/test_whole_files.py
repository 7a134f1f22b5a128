"""Files are written whole or not at all, and what a killed process leaves is told from what is being written."""

from pathlib import Path
from unittest.mock import patch

import pytest
from trt_spec.engines.bundle import whole_files
from trt_spec.engines.bundle.whole_files import remove_leftovers, write_whole, written_aside

from ..kit.machine_faults import no_file_larger_than, running

HALF_WRITTEN = """
import sys
from pathlib import Path
from trt_spec.engines.bundle.whole_files import written_aside

with written_aside(Path(sys.argv[1])) as stream:
    stream.write(b"half")
    stream.flush()
    print("half", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_full_disk_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, b"old")
    for content in (b"x" * 200, b"x" * 200_000):  # in a buffer until the end, and not
        with no_file_larger_than(100), pytest.raises(OSError, match="File too large"):
            write_whole(file, content)
        assert file.read_bytes() == b"old"
        assert names(tmp_path) == ["file"]


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    file = tmp_path / "file[1]"
    file.write_bytes(b"old")
    with running(HALF_WRITTEN, file) as process:
        process.kill()
        process.wait()
    assert len(names(tmp_path)) == 2
    assert file.read_bytes() == b"old"
    write_whole(tmp_path / "file", b"of another name")
    assert len(names(tmp_path)) == 3
    write_whole(file, b"new")
    assert names(tmp_path) == ["file", "file[1]"]
    assert file.read_bytes() == b"new"


def test_what_a_live_process_is_writing_stays_and_arrives(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with running(HALF_WRITTEN, file) as process:
        [partial] = tmp_path.iterdir()
        write_whole(file, b"meanwhile")
        remove_leftovers(tmp_path)
        assert partial.read_bytes() == b"half"
        process.communicate()
        assert process.returncode == 0
    assert names(tmp_path) == ["file"]
    assert file.read_bytes() == b"half"


def test_leftovers_of_a_folder_go_whatever_their_name_and_nothing_else_does(tmp_path: Path) -> None:
    kept = [".a.partial-mine", "a.partial-0123abcd", ".a.lock-0123abcd", ".partial-0123abcd"]
    for name in [*kept, ".a.partial-0123abcd", ".b.c.partial-0123abcd"]:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted(kept)


def test_a_file_that_was_removed_before_it_was_locked_is_made_anew(tmp_path: Path) -> None:
    lock, removed = whole_files._lock, []

    def too_late(stream: object, wait: bool) -> bool:
        if not removed:
            removed.extend(tmp_path.glob(".file.partial-*"))
            removed[0].unlink()
        return lock(stream, wait)

    with patch.object(whole_files, "_lock", too_late), written_aside(tmp_path / "file") as stream:
        stream.write(b"whole")
    assert len(removed) == 1
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_where_there_are_no_locks_files_are_written_and_nothing_is_taken_for_a_leftover(tmp_path: Path) -> None:
    (tmp_path / ".file.partial-0123abcd").touch()
    with patch.object(whole_files, "fcntl", None):
        write_whole(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert names(tmp_path) == [".file.partial-0123abcd", "file"]
