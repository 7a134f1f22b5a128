"""All kinds of rounds, and an engine that computes nothing: what a round does beside its models can be watched."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from trt_spec.engines import Bundle, Contract, Engine, Step
from trt_spec.runtime.acceptance.filters import FILTERS
from trt_spec.runtime.drafters import Drafter, Resources, open_drafters
from trt_spec.runtime.memory.model import Model
from trt_spec.runtime.state.plan import Level, Plan

from ...kit.bundles import DRAFTERS_OF_A_PAIR

KINDS: dict[str, dict[str, Any]] = {  # fields of a plan; drafters and filters by name
    "plain": {"draft_length": 0, "coupled": True},
    "greedy": {"lines": [["model"]], "coupled": True},
    "rejection": {"lines": [["model"]], "rejection": True, "filters": ["temperature"]},
    "own draft temperature": {
        "lines": [["model"]],
        "rejection": True,
        "own_draft": True,
        "draft_filters": ["temperature"],
    },
    "coupled": {"lines": [["model"]], "coupled": True, "gumbel": True},
    "both rules": {"lines": [["model"]], "rejection": True, "coupled": True, "gumbel": True, "ragged": True},
    "lenient": {"lines": [["model"]], "tokenwise": True, "coupled": True, "lenient": True},
    "tokenwise": {"lines": [["model"]], "tokenwise": True, "ragged": True},
    "all rules": {
        "lines": [["model"]],
        "rejection": True,
        "tokenwise": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
        "lenient": True,
    },
    "lookup": {"lines": [["lookup"]], "rejection": True, "ragged": True},
    "two drafters": {"lines": [["model", "lookup"]], "rejection": True, "ragged": True},
    "suffix": {"lines": [["suffix"]], "rejection": True},
    "ngram": {"lines": [["ngram"]], "rejection": True, "ragged": True},
    "random": {"lines": [["random"]], "coupled": True, "gumbel": True},
    "cascade": {
        "lines": [["cascade"]],
        "rejection": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
        "filters": ["repetition_penalty"],
    },
    "one guess": {"draft_length": 1, "lines": [["cascade"]], "coupled": True, "ragged": True},
    "all drafters": {"lines": [DRAFTERS_OF_A_PAIR], "rejection": True, "coupled": True, "ragged": True},
    "filters": {
        "lines": [["model"]],
        "rejection": True,
        "filters": ["logit_bias", "repetition_penalty", "top_k", "top_p", "min_p"],
    },
    "comb": {"lines": [["model"]], "branches": 2, "leaves": Level(2, 3), "rejection": True},
    "coupled comb": {"lines": [["model"]], "branches": 2, "leaves": Level(2, 3), "coupled": True, "gumbel": True},
    "comb of all kinds": {
        "lines": [["model", "lookup"]],
        "branches": 3,
        "leaves": Level(3, 3),
        "rejection": True,
        "tokenwise": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
        "entropies": True,
        "logprobs": 2,
        "traced": True,
        "filters": ["top_k", "top_p"],
    },
    "lenient comb": {
        "lines": [["model"]],
        "branches": 2,
        "leaves": Level(2, 3),
        "tokenwise": True,
        "coupled": True,
        "lenient": True,
    },
    "lines": {"lines": [["model"], ["random"], ["lookup"]], "rejection": True, "window": 4, "ragged": True},
    "lenient lines": {
        "lines": [["model"], ["random"]],
        "tokenwise": True,
        "coupled": True,
        "lenient": True,
        "window": 4,
    },
    "continuations": {
        "lines": [["lookup"], ["lookup"], ["suffix", "lookup"], ["suffix"]],
        "tokenwise": True,
        "ragged": True,
    },
    "coupled lines": {"lines": [["ngram"], ["model"]], "coupled": True, "gumbel": True, "window": 4},
    "lines and combs of all kinds": {
        "lines": [["model", "lookup"], ["model", "suffix"]],
        "branches": 4,
        "leaves": Level(4, 3),
        "window": 4,
        "rejection": True,
        "tokenwise": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
        "entropies": True,
        "logprobs": 2,
        "traced": True,
        "filters": ["top_k", "top_p"],
    },
    "tree": {"lines": [["model"]], "branches": 6, "levels": (Level(2, 2), Level(4, 3)), "rejection": True},
    "coupled tree": {
        "lines": [["model"]],
        "branches": 5,
        "levels": (Level(2, 4), Level(0, 1), Level(3, 4)),
        "coupled": True,
        "gumbel": True,
    },
    "tree beside a cascade": {
        "lines": [["model", "cascade"]],
        "branches": 5,
        "levels": (Level(2, 4), Level(3, 4)),
        "rejection": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
    },
    "trees, lines and combs of all kinds": {
        "lines": [["model", "lookup"], ["model", "suffix"]],
        "branches": 5,
        "leaves": Level(4, 3),
        "levels": (Level(1, 2), Level(3, 4)),
        "window": 4,
        "rejection": True,
        "tokenwise": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
        "entropies": True,
        "logprobs": 2,
        "traced": True,
        "filters": ["repetition_penalty", "top_k", "top_p"],
    },
    "entropies": {"lines": [["model"]], "rejection": True, "ragged": True, "entropies": True},
    "log-probs and trace": {"lines": [["model"]], "rejection": True, "logprobs": 2, "traced": True},
}


def plan_of(kind: str, drafters: Mapping[str, Drafter]) -> Plan:
    by_field = {name: one for one in FILTERS for name in one.fields}
    fields = {"draft_length": 3} | KINDS[kind]
    fields["lines"] = tuple(tuple(drafters[name] for name in line) for line in fields.get("lines", [[]]))
    for name in ("filters", "draft_filters"):
        fields[name] = tuple(by_field[one] for one in fields.get(name, ()))
    return Plan(2, **fields)


class IdleEngine(Engine):
    """Checks where the tensors of its steps are, and does nothing with them."""

    static_capacity = reads_prefixes = reads_together = True
    verify_width = read_width = 17

    def __init__(self, contract: Contract, device: str) -> None:
        self.contract, self.device = contract, device

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        self.contract.sizes({**inputs, **outputs})
        assert {tensor.device for tensor in (*inputs.values(), *outputs.values())} == {torch.device(self.device)}
        return Step(inputs, outputs, lambda: None)

    def capturable(self) -> bool:
        return True


def idle_models(bundle: Bundle, device: str, max_batch: int) -> tuple[Model, Model, dict[str, Drafter]]:
    """Target and draft of a bundle on any device, and all drafters over them."""
    vocab = bundle.tokenizer.vocab_size
    target, draft = (
        Model(IdleEngine(entry.contract, device), vocab, max_batch, bundle.capacity) for entry in bundle.models.values()
    )
    drafters, _ = open_drafters(Resources(bundle, target, {"draft": draft}, max_batch))
    assert list(drafters) == DRAFTERS_OF_A_PAIR
    return target, draft, drafters
