"""A toy model of one layer that keeps what no exported family keeps: values larger than its keys, features, a summary.

The features of a token are a state per token. What the model says depends on their mean over the whole context: over
the entries of the features, or, with a summary, over a state per row that has absorbed those before the last call.
"""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from torch import Tensor
from trt_spec.engines import ROW, Bundle, Contract, State

from .bundles import Pair, save_graph

VOCAB, HIDDEN, HEADS, KV_HEADS, KEY, FEATURES, POSITIONS = 64, 32, 4, 2, 16, 12, 256

MASK = """
    starts = Unsqueeze (start, one)
    behind = Add (starts, depths)
    position = Min (behind, last_position)
    capacity = Shape <start = 2, end = 3> (past_key_0)
    tokens = Shape <start = 1, end = 2> (input_ids)
    entry_count = Squeeze (capacity)
    token_count = Squeeze (tokens)
    entries = Range (first, entry_count, step)
    steps = Range (first, token_count, step)
    earlier = Less (entries, starts)
    own = Add (starts, steps)
    each = Concat <axis = 0> (one, tokens, one)
    earlier_wide = Unsqueeze (earlier, one)
    earlier_each = Expand (earlier_wide, each)
    own_wide = Unsqueeze (own, one)
    own_each = Expand (own_wide, each)
    seen = ScatterElements <axis = 2> (earlier_each, own_each, ancestors)
    mask = Unsqueeze (seen, one)
"""
LAYER = """
    at = Gather (places, position)
    word = Gather (embedding, input_ids)
    embedded = Add (word, at)
    query = MatMul (embedded, query_weight)
    query_split = Reshape (query, query_shape)
    queries = Transpose <perm = [0, 2, 1, 3]> (query_split)
    key = MatMul (embedded, key_weight)
    key_split = Reshape (key, key_shape)
    keys = Transpose <perm = [0, 2, 1, 3]> (key_split)
    value = MatMul (embedded, value_weight)
    value_split = Reshape (value, value_shape)
    values = Transpose <perm = [0, 2, 1, 3]> (value_split)
    present_key_0 = TensorScatter <axis = 2> (past_key_0, keys, start)
    present_value_0 = TensorScatter <axis = 2> (past_value_0, values, start)
    attended = Attention <scale = 0.25> (queries, present_key_0, present_value_0, mask)
    joined = Transpose <perm = [0, 2, 1, 3]> (attended)
    flat = Reshape (joined, flat_shape)
    output = MatMul (flat, output_weight)
    after_attention = Add (embedded, output)
"""
FEATURES_OF_TOKENS = """
    projected = MatMul (embedded, feature_weight)
    feature = Tanh (projected)
    feature_wide = Unsqueeze (feature, one)
    present_features = TensorScatter <axis = 2> (past_features, feature_wide, start)
    sees = Cast <to = 1> (ancestors)
    own_sum = MatMul (sees, feature)
    {base}
    counts = Cast <to = 1> ({counted})
    counts_wide = Unsqueeze (counts, one_and_two)
    counted_sum = MatMul (counts_wide, present_features)
    entries_sum = Squeeze (counted_sum, one)
    {absorb}
    context_sum = Add ({before}, own_sum)
    context = Add (behind, one)
    context_length = Cast <to = 1> (context)
    context_wide = Unsqueeze (context_length, two)
    mean = Div (context_sum, context_wide)
    told = MatMul (mean, mean_weight)
    hidden = Add (after_attention, told)
"""
BASE = """
    base, absorbed = Split <axis = 1> (past_summary, summary_parts)
    entry_numbers = Cast <to = 1> (entries)
    in_summary = Less (entry_numbers, base)
    not_in_summary = Not (in_summary)
    since = And (earlier, not_in_summary)
"""
ABSORB = """
    absorbed_wide = Unsqueeze (absorbed, one)
    all_sum = Add (absorbed_wide, entries_sum)
    new_base = Cast <to = 1> (starts)
    now_absorbed = Squeeze (all_sum, one)
    present_summary = Concat <axis = 1> (new_base, now_absorbed)
"""
HEAD = """
    picked_wide = Unsqueeze (logit_rows, two)
    picked_each = Expand (picked_wide, hidden_shape)
    picked = GatherElements <axis = 1> ({hidden}, picked_each)
    logits = MatMul (picked, head)
"""


@dataclass(frozen=True)
class Toy:
    """A model with random weights."""

    value_size: int = 24
    features: bool = True
    summary: bool = True
    noise: float = 0.0  # in all weights, relative to their spread
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {
            "embedding": (VOCAB, HIDDEN),
            "places": (POSITIONS, HIDDEN),
            "query_weight": (HIDDEN, HEADS * KEY),
            "key_weight": (HIDDEN, KV_HEADS * KEY),
            "value_weight": (HIDDEN, KV_HEADS * self.value_size),
            "output_weight": (HEADS * self.value_size, HIDDEN),
            "head": (HIDDEN, VOCAB),
            "feature_weight": (HIDDEN, FEATURES),
            "mean_weight": (FEATURES, HIDDEN),
        }
        generator, noises = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        weights = {}
        for name, (rows, columns) in sizes.items():
            spread = 3.0 if name == "mean_weight" else 1.0 if name == "embedding" else rows**-0.5
            exact = spread * torch.randn(rows, columns, generator=generator)
            weights[name] = exact + self.noise * spread * torch.randn(rows, columns, generator=noises)
        object.__setattr__(self, "weights", weights)

    @property
    def contract(self) -> Contract:
        states = [State("key_0", (KV_HEADS, KEY), "float32"), State("value_0", (KV_HEADS, self.value_size), "float32")]
        if self.features:
            states.append(State("features", (1, FEATURES), "float32"))
        if self.summary:
            states.append(State("summary", (1 + FEATURES,), "float32", ROW))
        return Contract(1, HEADS, tuple(states), VOCAB, POSITIONS, "float32")

    def graph(self) -> onnx.ModelProto:
        nodes = MASK + LAYER
        if self.summary:
            nodes += FEATURES_OF_TOKENS.format(base=BASE, counted="since", absorb=ABSORB, before="all_sum")
        elif self.features:
            nodes += FEATURES_OF_TOKENS.format(base="", counted="earlier", absorb="", before="entries_sum")
        nodes += HEAD.format(hidden="hidden" if self.features else "after_attention")
        names = {"float32": "float", "int64": "int64", "bool": "bool"}
        given, wanted = (
            ", ".join(f"{names[spec.dtype]}[{', '.join(map(str, spec.shape))}] {spec.name}" for spec in specs)
            for specs in (self.contract.inputs, self.contract.outputs)
        )
        model = parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 24]> toy ({given}) => ({wanted}) {{ {nodes} }}'
        )
        for place, node in enumerate(model.graph.node):
            node.name = f"node_{place}"
        numbers = {
            "one": [1],
            "two": [2],
            "one_and_two": [1, 2],
            "first": 0,
            "step": 1,
            "last_position": POSITIONS - 1,
            "query_shape": [0, 0, HEADS, KEY],
            "key_shape": [0, 0, KV_HEADS, KEY],
            "value_shape": [0, 0, KV_HEADS, self.value_size],
            "flat_shape": [0, 0, HEADS * self.value_size],
            "hidden_shape": [1, 1, HIDDEN],
            "summary_parts": [1, FEATURES],
        }
        read = {name for node in model.graph.node for name in node.input}
        for name, weight in self.weights.items():
            if name in read:
                model.graph.initializer.append(numpy_helper.from_array(weight.numpy(), name))
        for name, number in numbers.items():
            if name in read:
                flat = number if isinstance(number, list) else [number]
                dims = [len(number)] if isinstance(number, list) else []
                model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, dims, flat))
        onnx.checker.check_model(model)
        return model

    def logits(self, tokens: list[int]) -> Tensor:
        """What it says after the last of these tokens [V], from the definition and in float64."""
        weights = {name: weight.double() for name, weight in self.weights.items()}
        embedded = weights["embedding"][tokens] + weights["places"][: len(tokens)]  # [T, H]
        query = (embedded[-1] @ weights["query_weight"]).view(KV_HEADS, HEADS // KV_HEADS, KEY)
        key = (embedded @ weights["key_weight"]).view(-1, KV_HEADS, KEY)
        value = (embedded @ weights["value_weight"]).view(-1, KV_HEADS, self.value_size)
        shares = torch.einsum("ghd,tgd->ght", query, key).mul(0.25).softmax(-1)
        hidden = embedded[-1] + torch.einsum("ght,tgd->ghd", shares, value).flatten() @ weights["output_weight"]
        if self.features:
            hidden = hidden + (embedded @ weights["feature_weight"]).tanh().mean(0) @ weights["mean_weight"]
        return hidden @ weights["head"]


def with_toys(pair: Pair, folder: Path, toy: Toy) -> Path:
    """The bundle with this target, and a draft that often agrees with it and keeps no state per row."""
    shutil.copytree(pair.bundle, folder)
    bundle = Bundle.open(pair.bundle)
    models = dict(bundle.models)
    for role, one in (("target", toy), ("draft", replace(toy, summary=False, noise=0.1))):
        save_graph(one.graph(), folder, role)
        models[role] = replace(models[role], contract=one.contract)
    replace(bundle, path=folder, models=models).save()
    return folder
