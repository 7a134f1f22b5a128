"""The lengths of a cache that steps read."""

import pytest
from trt_spec.runtime.memory.bucket import bucket


@pytest.mark.parametrize(
    ("needed", "found"),
    [(1, 256), (256, 256), (257, 512), (512, 512), (513, 1024), (1025, 2048), (2048, 2048), (2049, 4000), (4000, 4000)],
)
def test_the_shortest_power_that_holds_all_is_read_and_never_more_than_there_is(needed: int, found: int) -> None:
    assert bucket(needed, 4000) == found
