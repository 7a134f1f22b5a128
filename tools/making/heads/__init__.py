"""The kinds of heads that can be trained: a row each in this table, and a file for those that are alike."""

from typing import Any

from .eagle3 import Eagle3Lesson
from .lesson import Lesson
from .look_aheads import PassLesson
from .mtp import MtpLesson
from .parallel import BlockwiseLesson, MedusaLesson

LESSONS: dict[str, type[Lesson[Any]]] = {
    "eagle3": Eagle3Lesson,
    "mtp": MtpLesson,
    "medusa": MedusaLesson,
    "blockwise": BlockwiseLesson,
    "pass": PassLesson,
}
