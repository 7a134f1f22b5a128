import pytest
from trt_spec.engines import RequestError
from trt_spec.tools.whole_file import whole_file

from ..kit.machine_faults import no_file_larger_than


def test_the_file_appears_whole_at_the_end(tmp_path):
    out = tmp_path / "out.json"
    out.write_text("old")
    with whole_file(out) as stream:
        stream.write("new")
        assert out.read_text() == "old"
    assert out.read_text() == "new"
    assert list(tmp_path.iterdir()) == [out]


def test_a_failed_block_leaves_the_old_file_and_nothing_else(tmp_path):
    out = tmp_path / "out.json"
    out.write_text("old")

    def write_half() -> None:
        with whole_file(out) as stream:
            stream.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_place_that_cannot_be_written_is_refused_before_the_block(tmp_path):
    with pytest.raises(RequestError, match="is a directory, expected a file name"), whole_file(tmp_path):
        raise AssertionError("the block must not run")
    missing = tmp_path / "missing" / "out.json"
    with pytest.raises(RequestError, match=r"cannot be written \(No such file"), whole_file(missing):
        raise AssertionError("the block must not run")


@pytest.mark.parametrize("size", [200, 200_000])
def test_a_full_disk_is_said_and_leaves_the_old_file(tmp_path, size):
    """Whether it is met at the end or on the way."""
    out = tmp_path / "out.json"
    out.write_text("old")
    said = r"out.json cannot be written \(File too large\); make room or choose another"
    with no_file_larger_than(100), pytest.raises(RequestError, match=said), whole_file(out) as stream:
        stream.write("x" * size)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]
