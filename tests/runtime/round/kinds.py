"""All kinds of rounds, and an engine that computes nothing: what a round does beside its models can be watched."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from trt_spec.engines import Bundle, Contract, Step
from trt_spec.engines.engine import chunks
from trt_spec.runtime.acceptance.filters import FILTERS
from trt_spec.runtime.drafters import CONTINUATIONS, Drafter, Resources, open_drafters
from trt_spec.runtime.memory.model import Model
from trt_spec.runtime.state.plan import Level, Plan

from ...bundles import DRAFTERS_OF_A_PAIR

KINDS: dict[str, dict[str, Any]] = {  # fields of a plan; sources and filters by name
    "plain": {"draft_length": 0, "coupled": True},
    "greedy": {"sources": ["model"], "coupled": True},
    "rejection": {"sources": ["model"], "rejection": True, "filters": ["temperature"]},
    "own draft temperature": {
        "sources": ["model"],
        "rejection": True,
        "own_draft": True,
        "draft_filters": ["temperature"],
    },
    "coupled": {"sources": ["model"], "coupled": True, "gumbel": True},
    "both rules": {"sources": ["model"], "rejection": True, "coupled": True, "gumbel": True, "ragged": True},
    "lenient": {"sources": ["model"], "tokenwise": True, "coupled": True, "lenient": True},
    "tokenwise": {"sources": ["model"], "tokenwise": True, "ragged": True},
    "all rules": {
        "sources": ["model"],
        "rejection": True,
        "tokenwise": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
        "lenient": True,
    },
    "lookup": {"sources": ["lookup"], "rejection": True, "ragged": True},
    "two drafters": {"sources": ["model", "lookup"], "rejection": True, "ragged": True},
    "suffix": {"sources": ["suffix"], "rejection": True},
    "ngram": {"sources": ["ngram"], "rejection": True, "ragged": True},
    "random": {"sources": ["random"], "coupled": True, "gumbel": True},
    "cascade": {
        "sources": ["cascade"],
        "rejection": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
        "filters": ["repetition_penalty"],
    },
    "one guess": {"draft_length": 1, "sources": ["cascade"], "coupled": True, "ragged": True},
    "all drafters": {"sources": DRAFTERS_OF_A_PAIR, "rejection": True, "coupled": True, "ragged": True},
    "filters": {
        "sources": ["model"],
        "rejection": True,
        "filters": ["logit_bias", "repetition_penalty", "top_k", "top_p", "min_p"],
    },
    "comb": {"sources": ["model"], "siblings": 2, "rejection": True},
    "coupled comb": {"sources": ["model"], "siblings": 2, "coupled": True, "gumbel": True},
    "comb of all kinds": {
        "sources": ["model", "lookup"],
        "siblings": 3,
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
    "lenient comb": {"sources": ["model"], "siblings": 2, "tokenwise": True, "coupled": True, "lenient": True},
    "lines": {"sources": ["model"], "beside": [["random"], ["lookup"]], "rejection": True, "window": 4, "ragged": True},
    "lenient lines": {
        "sources": ["model"],
        "beside": [["random"]],
        "tokenwise": True,
        "coupled": True,
        "lenient": True,
        "window": 4,
    },
    "continuations": {
        "sources": ["lookup"],
        "beside": [["lookup2"], ["suffix", "lookup3"], ["suffix2"]],
        "tokenwise": True,
        "ragged": True,
    },
    "coupled lines": {"sources": ["ngram"], "beside": [["model"]], "coupled": True, "gumbel": True, "window": 4},
    "lines and combs of all kinds": {
        "sources": ["model", "lookup"],
        "beside": [["model", "suffix"]],
        "siblings": 4,
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
    "tree": {"sources": ["model"], "branches": 6, "levels": (Level(2, 2), Level(4, 3)), "rejection": True},
    "coupled tree": {
        "sources": ["model"],
        "branches": 5,
        "levels": (Level(2, 4), Level(0, 1), Level(3, 4)),
        "coupled": True,
        "gumbel": True,
    },
    "tree beside a cascade": {
        "sources": ["model", "cascade"],
        "branches": 5,
        "levels": (Level(2, 4), Level(3, 4)),
        "rejection": True,
        "coupled": True,
        "gumbel": True,
        "ragged": True,
    },
    "trees, lines and combs of all kinds": {
        "sources": ["model", "lookup"],
        "beside": [["model", "suffix"]],
        "siblings": 4,
        "branches": 5,
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
    "entropies": {"sources": ["model"], "rejection": True, "ragged": True, "entropies": True},
    "log-probs and trace": {"sources": ["model"], "rejection": True, "logprobs": 2, "traced": True},
}


def plan_of(kind: str, drafters: Mapping[str, Drafter]) -> Plan:
    by_field = {name: one for one in FILTERS for name in one.fields}
    fields = {"draft_length": 3} | KINDS[kind]
    fields |= {"sources": tuple(drafters[name] for name in fields.get("sources", ()))}
    fields["beside"] = tuple(tuple(drafters[name] for name in line) for line in fields.get("beside", ()))
    for name in ("filters", "draft_filters"):
        fields[name] = tuple(by_field[one] for one in fields.get(name, ()))
    return Plan(2, **fields)


class IdleEngine:
    """Checks where the tensors of its steps are, and does nothing with them."""

    static_capacity, reads_prefixes, own_threads, takes_trees = True, True, False, True
    verify_width, reads_together = 17, True

    def __init__(self, contract: Contract, device: str) -> None:
        self.contract, self.device = contract, device

    def reserve(self, rows: int, capacity: int) -> None: ...

    def prefill_widths(self, tokens: int) -> list[int]:
        return chunks(tokens, 256)

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        self.contract.sizes({**inputs, **outputs})
        assert {tensor.device for tensor in (*inputs.values(), *outputs.values())} == {torch.device(self.device)}
        return Step(inputs, outputs, lambda: None)

    def capturable(self) -> bool:
        return True

    def settle(self) -> None: ...

    def close(self) -> None: ...


def idle_models(bundle: Bundle, device: str, max_batch: int) -> tuple[Model, Model, dict[str, Drafter]]:
    """Target and draft of a bundle on any device, and all drafters over them."""
    vocab = bundle.tokenizer.vocab_size
    target, draft = (
        Model(IdleEngine(entry.contract, device), vocab, max_batch, bundle.capacity) for entry in bundle.models.values()
    )
    drafters, _ = open_drafters(Resources(bundle, target, [draft], max_batch))
    assert list(drafters) == [*DRAFTERS_OF_A_PAIR, *CONTINUATIONS]
    return target, draft, drafters
