"""Attention whose mask is the contract's own becomes one operator that computes the mask from the call's inputs.

Which mask a graph has is found by trial: over a cache as long as any, it must be the contract's in every entry.
Anything else stays as it is: other masks, numbers added to the scores, attention over a source.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract import TAILS, TOKEN, AnyContract, Contract
from ..attending import left_by_sinks, seen_entries
from ..kernels.attention import MOST_NUMBERS
from ..onnx_graph import Node
from .rewriting import Rewriting, fused
from .trial import computed

CALL = ("start", "depths", "ancestors")
KNOWN = {"is_causal", "scale", "softcap"}  # attributes; the first is always 0
BATCH, WIDTH, LISTED, SLACK = 3, 4, 6, 64
TRIALS = 3


def fuse(graph: Rewriting) -> int:
    contract = graph.contract
    if not isinstance(contract, Contract):
        return 0
    windows: dict[str, int | None] = {}
    fired = 0
    for node in graph.all("Attention"):
        if len(node.inputs) != 4 or not KNOWN.issuperset(node.attributes):
            continue
        *tensors, mask = node.inputs
        if mask not in windows:
            windows[mask] = _window(graph, contract, mask)
        if windows[mask] is None:
            continue
        attributes = {name: value for name, value in node.attributes.items() if name != "is_causal"}
        attributes["window"] = windows[mask]
        inputs, outputs, old = [*tensors, *CALL], node.outputs, [node]
        product = graph.only_reader(node.outputs[0], "Mul")
        if product and (sinks := _sinks(graph, contract, node, product)):
            inputs, outputs, old = [*inputs, sinks], product.outputs, [node, product]
        graph.replace(old, fused("Attention", inputs, outputs, **attributes))
        fired += 1
    return fired


def reads_live(nodes: Sequence[Node], contract: AnyContract) -> bool:
    """Whether the kernel alone reads the entries of tokens: then a step of few tokens reads no entry that is dead.

    It needs no length of the cache to read, and is converted and recorded once.
    """
    states = contract.of_kind(TOKEN) if isinstance(contract, Contract) else ()
    entries = {f"present_{state.name}" for state in states}
    fitting = all(state.shape[-1] <= MOST_NUMBERS and state.dtype == contract.dtype for state in states)
    readers = [node.op for node in nodes if entries.intersection(node.inputs)]
    return fitting and bool(readers) and set(readers) == {"trt_spec::Attention"}


def _window(graph: Rewriting, contract: Contract, mask: str) -> int | None:
    """Return how many positions a token sees by this mask, 0 for all before it, or None for any other mask."""
    constants = [graph.constants.get(name) for node in graph.needed_for([mask]) for name in node.inputs]
    numbers = {int(one) for one in constants if one is not None and one.dtype == torch.int64 and one.numel() == 1}
    fitting = [0, *sorted(number for number in numbers if number > 0)]
    capacity = contract.max_length + SLACK
    listed = LISTED if TAILS in contract.capabilities else WIDTH
    sizes = {"batch": BATCH, "width": WIDTH, "tail": listed, "capacity": capacity}
    for seed in range(TRIALS):
        call = _call(seed, listed, capacity)
        found = computed(graph, mask, call, sizes)
        if found is None or found.dtype != torch.bool:
            return None
        fitting = [one for one in fitting if torch.equal(found, seen_entries(**call, capacity=capacity, window=one))]
    return fitting[0] if fitting else None


def _call(seed: int, listed: int, capacity: int) -> dict[str, Tensor]:
    """Return a call's inputs: rows at the beginning, in the middle and at the end of a cache, which see any tokens."""
    random = torch.Generator().manual_seed(seed)
    return {
        "start": torch.tensor([listed - WIDTH, capacity // 2, capacity - WIDTH]),
        "depths": torch.randint(listed, (BATCH, listed), generator=random) - (listed - WIDTH),
        "ancestors": torch.rand(BATCH, WIDTH, listed, generator=random) < 0.5,
    }


def _sinks(graph: Rewriting, contract: Contract, node: Node, product: Node) -> str | None:
    """Return the constant of the sinks if a product takes off their share of what is attended, or None."""
    query, key, _, mask = node.inputs
    shares = [one for one in product.inputs if one != node.outputs[0]]
    memory = {spec.name: spec for spec in contract.outputs}.get(key)
    if len(shares) != 1 or memory is None or node.attributes.get("softcap") or "scale" not in node.attributes:
        return None
    random = torch.Generator().manual_seed(0)
    sizes = {"batch": BATCH, "width": WIDTH, "tail": LISTED, "capacity": SLACK}
    asked = torch.randn(BATCH, contract.heads, WIDTH, int(memory.shape[3]), generator=random)
    keys = torch.randn(BATCH, int(memory.shape[1]), SLACK, int(memory.shape[3]), generator=random)
    asked, keys = asked.to(getattr(torch, contract.dtype)), keys.to(getattr(torch, memory.dtype))
    seen = torch.rand(BATCH, 1, WIDTH, SLACK, generator=random) < 0.5
    given = {query: asked, key: keys, mask: seen}
    share = computed(graph, shares[0], given, sizes)
    near = max(1e-5, 2 * torch.finfo(asked.dtype).eps)
    for name in dict.fromkeys(name for node in graph.needed_for(shares, given) for name in node.inputs):
        sinks = graph.constants.get(name)
        if share is None or sinks is None or not sinks.is_floating_point() or sinks.numel() != contract.heads:
            continue
        expected = left_by_sinks(asked, keys, seen, node.attributes["scale"], sinks)
        if share.shape == expected.shape and torch.allclose(share, expected, rtol=0, atol=near):
            return name
    return None
