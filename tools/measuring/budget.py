"""Run the parts of a measurement, the most telling first, within so many minutes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ...engines.errors import first_line
from ..interruption import TimeUp, ended_after, insist

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float  # that it takes at least: it does not begin if fewer are left
    rows: Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Done:
    """What became of a part."""

    failed: str | None = None  # why
    left_out: str | None = None  # why; what it had found until then stays


def run_parts(
    parts: Iterable[Part], seconds: float, show: Callable[[Part, Row], None], then: Callable[[], None]
) -> Iterator[tuple[Part, Done]]:
    """Run the parts that fit, show each row when it is known, and `then` clean up; one that fails stops no other."""
    ends = monotonic() + seconds
    for part in parts:
        insist()  # a signal that a library has suppressed ends all parts
        left = ends - monotonic()
        if left < part.seconds:
            yield part, Done(left_out=f"it takes {part.seconds:.0f} s, and {max(0.0, left):.0f} are left")
            continue
        try:
            with ended_after(left):
                for row in part.rows():
                    show(part, row)
        except TimeUp:
            yield part, Done(left_out="the time was over before it had ended")
        except Exception as error:  # any library may raise anything: the error is the result of this part
            yield part, Done(failed=f"{type(error).__name__}: {first_line(error)}")
        else:
            yield part, Done()
        then()
