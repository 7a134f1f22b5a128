"""The kinds of heads that can be trained: a file each, and a row in this table."""

from collections.abc import Callable
from typing import Any

from .eagle3 import Eagle3Lesson
from .lesson import Lesson

LESSONS: dict[str, Callable[..., Lesson[Any]]] = {"eagle3": Eagle3Lesson}
