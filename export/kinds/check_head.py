"""Compare a head's written graph in ONNX Runtime with the head in torch, in every way in which a round calls it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...engines import Contract, Engine, blank_cache, make_step
from ..checking.check import Errors
from .checked import checked, scale_of

READ = 24  # tokens that are committed before it proposes
WINDOW = 4  # of those, read again first
SLACK = 8
GARBAGE = 1e3  # what no slot may read
TREE = [-1, 0, 0, 1, 2, 2]  # the node that each follows; node 0 is the last committed token
CHUNK = 64
MASKS = 3  # that one pass reads


def check_head(
    graph: Path, contract: Contract, head: Any, tokens: Tensor, features: Tensor, quantised: bool
) -> tuple[dict[str, Any], Tensor]:
    """Check a graph on the features [L, hidden] of some tokens [L].

    Return the errors, and its logits [L - 1, V] in every slot of them.
    """

    def compare(engine: Engine, errors: Errors | None) -> Tensor:
        if errors is not None:
            _compare(engine, head, tokens, features, errors)
        given = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        return torch.cat(_chunks(engine, tokens, given))[1:]

    return checked(graph, contract, head, quantised, lambda: (scale_of(_said(head, tokens, features)[0]), compare))


def _said(head: Any, tokens: Tensor, features: Tensor, own: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Let torch read tokens [L] with the features of those before, and then some behind its own hidden states.

    Return the logits [L - 1, V] of the first slots, and logits and hidden states of the last one and those behind it.
    """
    cache, count = DynamicCache(), len(tokens)
    given = torch.cat([torch.zeros_like(features[:1]), features[: count - 1]])
    hidden, normed = head(tokens[None], given[None], torch.arange(count)[None], cache)
    logits = head.logits(normed)[0, 1:]
    last, states = [logits[-1]], [hidden[0, -1]]
    for place, token in enumerate(own, count):
        hidden, normed = head(torch.tensor([[token]]), states[-1][None, None], torch.tensor([[place]]), cache)
        last.append(head.logits(normed)[0, 0])
        states.append(hidden[0, 0])
    return logits, torch.stack(last), torch.stack(states)


def _compare(engine: Engine, head: Any, tokens: Tensor, features: Tensor, errors: Errors) -> None:
    count = min(READ, len(tokens) - SLACK)
    ends = [count, count - 5]  # of two rows
    cache = blank_cache(engine.contract, len(ends), count + 2 * SLACK)
    for name in engine.contract.cache_names:
        cache[name].fill_(GARBAGE)
    size = float(features.std())

    def call(ids: Tensor, start: list[int], given: Tensor, rows: Tensor, parents: list[int] | None = None) -> Any:
        inputs = {
            "input_ids": ids.contiguous(), "start": torch.tensor(start), "past_hidden": given.contiguous(),
            "logit_rows": rows,
        }  # fmt: skip
        if parents is not None:
            inputs |= _shape(parents, len(ids))
        logits = torch.zeros(*rows.shape, engine.contract.vocab_size)
        made = torch.zeros(*rows.shape, given.shape[2])
        make_step(engine, cache, inputs, {"logits": logits, "present_hidden": made}).run()
        return logits, made

    def windows(starts: list[int], width: int) -> tuple[Tensor, Tensor]:
        """The tokens of each row from its start on, and the features of those before; garbage where there are none."""
        given = torch.full((len(starts), width, features.shape[1]), GARBAGE)
        for row, start in enumerate(starts):
            first = int(start == 0)
            given[row, first:] = features[start + first - 1 : start + width - 1]
        return torch.stack([tokens[start : start + width] for start in starts]), given

    ids, given = windows([0, 0], count)  # the second row is padded with what comes behind it
    given[1, ends[1] :] = GARBAGE
    last = torch.tensor(ends)[:, None] - 1
    logits, made = call(ids, [0, 0], given, last)
    wanted = [_said(head, tokens[:end], features) for end in ends]
    for row, (_, its_logits, its_states) in enumerate(wanted):
        errors.compare("reading", logits[row], its_logits)
        errors.compare("hidden states", made[row], its_states, size)
    starts = [end - WINDOW for end in ends]
    logits, made = call(*_at(windows(starts, WINDOW), starts), torch.full((2, 1), WINDOW - 1))
    for row, (_, its_logits, _) in enumerate(wanted):
        errors.compare("last tokens again", logits[row], its_logits)
    proposed = tokens[ends[0] : ends[0] + 3]
    wanted = [_said(head, tokens[:end], features, tuple(proposed.tolist())) for end in ends]
    for place, token in enumerate(proposed):
        at = [end + place for end in ends]
        logits, made = call(token.expand(2, 1), at, made, torch.zeros(2, 1, dtype=torch.int64))
        for row, (_, its_logits, its_states) in enumerate(wanted):
            errors.compare("line", logits[row, 0], its_logits[place + 1])
            errors.compare("hidden states", made[row, 0], its_states[place + 1], size)
    _compare_trees(call, head, tokens, features, ends, errors)
    if head.mask_token is not None:
        ids, given = windows(starts, WINDOW)
        masks = torch.full((len(ends), MASKS), head.mask_token)
        given = torch.cat([given, torch.full((len(ends), MASKS, given.shape[2]), GARBAGE)], 1)
        rows = torch.arange(WINDOW - 1, WINDOW + MASKS).expand(len(ends), -1).contiguous()
        logits, _ = call(torch.cat([ids, masks], 1), starts, given, rows)
        for row, end in enumerate(ends):
            own = (head.mask_token,) * MASKS
            errors.compare("masks", logits[row], _said(head, tokens[:end], features, own)[1])


def _at(windows: tuple[Tensor, Tensor], starts: list[int]) -> tuple[Tensor, list[int], Tensor]:
    return windows[0], starts, windows[1]


def _compare_trees(call: Any, head: Any, tokens: Tensor, features: Tensor, ends: list[int], errors: Errors) -> None:
    """Grow a tree level by level: each call reads all of it, and what is not placed yet is garbage that nobody sees."""
    nodes = tokens[: len(TREE)].expand(len(ends), -1).clone()
    for row, end in enumerate(ends):
        nodes[row, 0] = tokens[end - 1]
    given = torch.full((len(ends), len(TREE), features.shape[1]), GARBAGE)
    given[:, 0] = features[[end - 2 for end in ends]]
    paths = [_path(node) for node in range(len(TREE))]
    made: dict[int, Tensor] = {}
    every = torch.arange(len(TREE)).expand(len(ends), -1).contiguous()
    for depth in range(max(map(len, paths))):
        for node, path in enumerate(paths):
            if len(path) == depth + 1 and depth:
                given[:, node] = made[TREE[node]]
        logits, hidden = call(nodes, [end - 1 for end in ends], given, every, TREE)
        for node, path in enumerate(paths):
            if len(path) != depth + 1:
                continue
            made[node] = hidden[:, node]
            for row, end in enumerate(ends):
                own = tuple(int(nodes[row, each]) for each in path[1:])
                errors.compare("tree", logits[row, node], _said(head, tokens[:end], features, own)[1][-1])


def _path(node: int) -> list[int]:
    return [*(_path(TREE[node]) if TREE[node] >= 0 else []), node]


def _shape(parents: list[int], batch: int) -> dict[str, Tensor]:
    paths = [_path(node) for node in range(len(parents))]
    depths = torch.tensor([len(path) - 1 for path in paths])
    ancestors = torch.tensor([[node in path for node in range(len(parents))] for path in paths])
    return {
        "depths": depths.expand(batch, -1).contiguous(),
        "ancestors": ancestors.expand(batch, -1, -1).contiguous(),
    }


def _chunks(engine: Engine, tokens: Tensor, given: Tensor) -> list[Tensor]:
    """Read all tokens [L] with the features [L, hidden] of those before them; return the logits of each chunk."""
    cache = blank_cache(engine.contract, 1, len(tokens))
    found = []
    for start in range(0, len(tokens), CHUNK):
        ids = tokens[None, start : start + CHUNK].contiguous()
        logits = torch.zeros(1, ids.shape[1], engine.contract.vocab_size)
        inputs = {
            "input_ids": ids,
            "start": torch.tensor([start]),
            "past_hidden": given[None, start : start + CHUNK].contiguous(),
        }
        make_step(engine, cache, inputs, {"logits": logits}).run()
        found.append(logits[0])
    return found
