"""The shapes that the controller may choose to have beside a line, as far as `trt-spec tune` has measured them."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..state.shapes import MOST_CHILDREN, Shape, comb, line
from .costs import Costs

Numbers = npt.NDArray[np.float64]


class Shapes(NamedTuple):
    """Each shape is nothing, so many leaves beside any line, or a tree, whose line has the tree's own length."""

    each: tuple[int | Shape, ...]  # [S]
    accepted: Mapping[str, Numbers]  # by drafter [S]: how many tokens of them were accepted where its line was rejected
    most: Numbers  # [S], how many can be accepted
    beyond: npt.NDArray[np.int64]  # [S], how many proposals they are
    fits: npt.NDArray[np.bool_]  # [S, K+1], beside a line of K = 0 … longest

    @classmethod
    def measured(cls, costs: Costs, growing: Collection[str], longest: int) -> "Shapes":
        """Return what was measured; only the drafters in `growing` can have trees here."""
        few, trees, lengths = (0, *costs.siblings), costs.trees, np.arange(longest + 1)
        here = {name: np.array([True] * len(few) + [name in growing] * len(trees)) for name in costs.beside_tokens}
        return cls(
            each=(*few, *trees),
            accepted={name: np.array([0.0, *tokens]) * here[name] for name, tokens in costs.beside_tokens.items()},
            most=np.array([1.0] * len(few) + [float(tree.length) for tree in trees]),
            beyond=np.array([*few, *(tree.beyond for tree in trees)]),
            fits=np.array(
                [
                    *(count <= (MOST_CHILDREN - 1) * lengths for count in few),
                    *(tree.length == lengths for tree in trees),
                ]
            ),
        )

    def tokens(self, drafter: str, gain: float, beyond: int) -> Numbers:
        """Return how many tokens [S] will be accepted where a line fails that may have so many proposals beside it.

        They are expected to be accepted `gain` times as often as measured.
        """
        expected: Numbers = np.where(self.beyond <= beyond, self.accepted[drafter] * gain, 0.0).clip(max=self.most)
        return expected

    def as_measured(self, drafter: str, shape: Shape) -> float:
        """Return how many tokens of this shape were accepted; 0 if that is not known."""
        measured = shape.beyond if shape.leaves else shape
        known = drafter in self.accepted and measured in self.each
        return float(self.accepted[drafter][self.each.index(measured)]) if known else 0.0

    def beside(self, length: int, shape: int) -> Shape:
        """Return a line of this length with one of these shapes beside it."""
        found = self.each[shape]
        if isinstance(found, Shape):
            return found
        return comb(length, found) if found else line(length)
