"""The calls by which the graph of a head of slots is checked: ragged rows, last tokens, lines, trees and masks."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...engines import Engine
from ..checking.check import Errors
from ..checking.scenarios import paths_of
from .written import GARBAGE, Cached

READ = 24  # tokens that are committed before it proposes
WINDOW = 4  # of those, read again first
SLACK = 8
TREE = [-1, 0, 0, 1, 2, 2]  # the node that each follows; node 0 is the last committed token
PATHS = paths_of(TREE)
CHUNK = 64
MASKS = 3  # that one pass reads


def said_by(head: Any, tokens: Tensor, features: Tensor, own: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Let torch read tokens [L] with the features of those before, and then some from its own hidden states.

    Return the logits [L - 1, V] of the first slots, and logits and hidden states of the last one and those after it.
    """
    cache, count = DynamicCache(), len(tokens)
    given = _of_those_before(features[:count])
    hidden, normed = head(tokens[None], given[None], torch.arange(count)[None], cache)
    logits = head.logits(normed)[0, 1:]
    last, states = [logits[-1]], [hidden[0, -1]]
    for place, token in enumerate(own, count):
        hidden, normed = head(torch.tensor([[token]]), states[-1][None, None], torch.tensor([[place]]), cache)
        last.append(head.logits(normed)[0, 0])
        states.append(hidden[0, 0])
    return logits, torch.stack(last), torch.stack(states)


def compare_slots(engine: Engine, head: Any, tokens: Tensor, features: Tensor, errors: Errors) -> None:
    count = min(READ, len(tokens) - SLACK)
    ends = [count, count - 5]  # of two rows
    cached = Cached.of(engine, len(ends), count + 2 * SLACK)
    size = float(features.std())

    def windows(starts: list[int], width: int) -> tuple[Tensor, Tensor]:
        """The tokens of each row from its start on, and the features of those before; garbage where there are none."""
        given = torch.full((len(starts), width, features.shape[1]), GARBAGE)
        for row, start in enumerate(starts):
            first = int(start == 0)
            given[row, first:] = features[start + first - 1 : start + width - 1]
        return torch.stack([tokens[start : start + width] for start in starts]), given

    ids, given = windows([0, 0], count)  # the second row is padded with what comes after it
    given[1, ends[1] :] = GARBAGE
    logits, made = cached.call(ids, [0, 0], given, torch.tensor(ends)[:, None] - 1)
    wanted = [said_by(head, tokens[:end], features) for end in ends]
    for row, (_, its_logits, its_states) in enumerate(wanted):
        errors.compare("reading", logits[row], its_logits)
        errors.compare("hidden states", made[row], its_states, size)
    starts = [end - WINDOW for end in ends]
    ids, given = windows(starts, WINDOW)
    logits, made = cached.call(ids, starts, given, torch.full((2, 1), WINDOW - 1))
    for row, (_, its_logits, _) in enumerate(wanted):
        errors.compare("last tokens again", logits[row], its_logits)
    proposed = tokens[ends[0] : ends[0] + 3]
    wanted = [said_by(head, tokens[:end], features, tuple(proposed.tolist())) for end in ends]
    for place, token in enumerate(proposed):
        at = [end + place for end in ends]
        logits, made = cached.call(token.expand(2, 1), at, made, torch.zeros(2, 1, dtype=torch.int64))
        for row, (_, its_logits, its_states) in enumerate(wanted):
            errors.compare("line", logits[row, 0], its_logits[place + 1])
            errors.compare("hidden states", made[row, 0], its_states[place + 1], size)
    _compare_trees(cached, head, tokens, features, ends, errors)
    if head.mask_token is not None:
        own = (head.mask_token,) * MASKS
        masked = torch.cat([ids, torch.tensor(own).expand(len(ends), -1)], 1)
        given = torch.cat([given, torch.full((len(ends), MASKS, given.shape[2]), GARBAGE)], 1)
        rows = torch.arange(WINDOW - 1, WINDOW + MASKS).expand(len(ends), -1)
        logits, _ = cached.call(masked, starts, given, rows)
        for row, end in enumerate(ends):
            errors.compare("masks", logits[row], said_by(head, tokens[:end], features, own)[1])


def _compare_trees(
    cached: Cached, head: Any, tokens: Tensor, features: Tensor, ends: list[int], errors: Errors
) -> None:
    """Grow a tree level by level: each call reads all of it, and what is not placed yet is garbage that nobody sees."""
    count = len(TREE)
    nodes = tokens[:count].expand(len(ends), -1).clone()
    for row, end in enumerate(ends):
        nodes[row, 0] = tokens[end - 1]
    given = torch.full((len(ends), count, features.shape[1]), GARBAGE)
    given[:, 0] = features[[end - 2 for end in ends]]
    made: dict[int, Tensor] = {}
    every = torch.arange(count).expand(len(ends), -1)
    tree = {
        "depths": torch.tensor([len(path) - 1 for path in PATHS]).expand(len(ends), -1),
        "ancestors": torch.tensor([[node in path for node in range(count)] for path in PATHS]).expand(
            len(ends), -1, -1
        ),
    }
    for depth in range(max(map(len, PATHS))):
        level = [(node, path) for node, path in enumerate(PATHS) if len(path) == depth + 1]
        for node, _ in level if depth else ():
            given[:, node] = made[TREE[node]]
        logits, hidden = cached.call(nodes, [end - 1 for end in ends], given, every, **tree)
        for node, path in level:
            made[node] = hidden[:, node]
            for row, end in enumerate(ends):
                own = tuple(int(nodes[row, each]) for each in path[1:])
                errors.compare("tree", logits[row, node], said_by(head, tokens[:end], features, own)[1][-1])


def said_in_chunks(engine: Engine, tokens: Tensor, features: Tensor) -> Tensor:
    """Let a graph read tokens [L] with the features of those before them; return logits [L - 1, V] but of the first."""
    cached, given = Cached.of(engine, 1, len(tokens)), _of_those_before(features)
    found = []
    for start in range(0, len(tokens), CHUNK):
        ids = tokens[None, start : start + CHUNK]
        rows = torch.arange(ids.shape[1])[None]
        found.append(cached.call(ids, [start], given[None, start : start + CHUNK], rows)[0][0])
    return torch.cat(found)[1:]


def _of_those_before(features: Tensor) -> Tensor:
    """Return the features [L, hidden] of the token before each, and zeros for the first."""
    return torch.cat([torch.zeros_like(features[:1]), features[:-1]])
