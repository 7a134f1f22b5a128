"""What a walk through a graph finds: all that changes, so that each shard computes its share."""

from dataclasses import dataclass, field

from .spread import Part, Spread


@dataclass(frozen=True)
class Cut:
    """The part of a constant that each shard has."""

    axis: int
    parts: tuple[Part, ...]


ALONE = Cut(0, ())  # what the first shard has, and the others as zeros


@dataclass
class Found:
    """What changes in a graph, so that each shard computes its share; nodes go by their first output."""

    cuts: dict[str, Cut] = field(default_factory=dict)  # of constants
    alone: set[str] = field(default_factory=set)  # constants that the first shard has, and the others as zeros
    sums: list[str] = field(default_factory=list)  # values of which every shard has one term
    norms: dict[str, int] = field(default_factory=dict)  # nodes that take a mean over so many entries of all shards
    means: list[str] = field(default_factory=list)  # of which every shard has the mean over its share
    lookups: dict[str, int] = field(default_factory=dict)  # nodes that look rows up, and how many a shard has
    numbers: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)  # in a shape that a node reads
    shares: dict[tuple[str, int], Spread] = field(default_factory=dict)  # of what a node reads, cut as it runs
    firsts: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # what a node reads, cut: axis, size
    heads: dict[str, int] = field(default_factory=dict)  # nodes that say how many heads they have
    groups: dict[str, int] = field(default_factory=dict)  # convolutions that say how many groups they have
    spreads: dict[str, Spread] = field(default_factory=dict)  # of inputs, outputs and values between
    heads_of_queries: int = 0  # that each shard has, if they are spread
    whole_for: dict[str, str] = field(default_factory=dict)  # what every shard has whole, and why


def total_of(mean: str) -> str:
    """Return the name of the sum that a mean is made of."""
    return f"{mean}.total"
