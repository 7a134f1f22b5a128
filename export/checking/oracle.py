"""Compute what the checkpoint itself says: with transformers' own model, attention and cache, in float32."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from ...engines import TAILS, Contract
from ..passes.divide_keys import NO_FACTORS
from ..tracing.hidden_states import LAST, NO_FEATURES, Features, all_features
from .quality import Sample, apart
from .rounded_cache import entries_rounded, narrow_states
from .scenarios import Call, RowCall, Script, leaves_of, line_of, random_tree, write_script

DEEP_CACHE_BYTES = 80 << 20  # in float32: reaches the last position of the smaller GPT2
SEED = 0
# Whose weights a module reads, or asks for their dtype; all feed-forward parts of T5 ask `wo`.
ASKED = {"Mamba2Block": "norm", "Mamba2ForCausalLM": "lm_head", "Gemma3nTextDecoderLayer": "altup"}


class Reference:
    """The checkpoint's answers, computed before the graph is opened: the two need not be in memory together."""

    script: Script
    branches: list[Tensor]  # [length, V] of each branch
    features: list[Tensor]  # [length, size] of each branch, if heads read some
    made: list[Tensor]  # rows of each cache buffer, as the model makes them: [1, kv_heads, rows, D]
    deep: list[Call]  # each continues a long cache of such rows
    deep_logits: list[Tensor]  # [real, V] of each
    order: Tensor  # in which a long cache repeats those rows: numbers grow where it holds what no model would make
    scale: float  # the standard deviation of the logits
    sources: list[list[Tensor]]  # what each row finds of its source: of each state [1, heads, S, D]
    read: dict[str, Tensor]  # what each head reads of the sample [L, size]
    full: Tensor  # logits [L, V] of the sample over a full cache, if the graph's is of eight bits,
    rounded: Tensor  # those over one that rounds as the graph's does,
    rounded_noise: float  # and what these move by where an entry is rounded the other way

    def __init__(
        self,
        model: Any,
        contract: Contract,
        sample: Sample,
        window: int | None = None,
        features: Mapping[str, Features] = NO_FEATURES,
        sources: Sequence[Tensor] = (),
        look_aheads: int = 0,
        factors: Mapping[str, Tensor] = NO_FACTORS,
    ) -> None:
        """Compute what the checkpoint says of a sample as it is, whatever its weights are rounded to afterwards.

        Each row's text has its source, if there are `sources`, as the encoder has made them. Long texts, and
        the sample's, have the first. Keys are divided by `factors` before a cache of eight bits rounds them.
        """
        self._contract = contract.in_dtype("float32")  # in which both sides compute
        self._window, self._features, self.heard, self._look_aheads = window, features, sources, look_aheads
        self.sample, self.factors = sample, factors
        with given_the_first(model, sources):
            self.sample_logits = checkpoint_logits(model, sample.tokens)  # [L, V]

    def answer(self, model: Any) -> None:
        """Compute what the checkpoint says of all calls."""
        contract, sample = self._contract, self.sample
        if narrow_states(contract):
            self._say_rounded(model)
        script = write_script(
            sample.vocab_size, contract.max_length, contract.recurrent, TAILS in contract.capabilities
        )
        script.look_ahead([contract.vocab_size + place for place in range(self._look_aheads)])
        self.script, self.branches = script, self._say_branches(model, script)
        self.deep, self.deep_logits, self.made, self.order = [], [], [], torch.zeros(0, dtype=torch.int64)
        if not contract.recurrent:  # whose states no cache could be filled with
            self.deep = _deep_calls(contract, sample.vocab_size, self._window)
            generator = torch.Generator().manual_seed(SEED)
            self.order = torch.randint(2**31, (self.deep[0].rows[0].start,), generator=generator)
            with given_the_first(model, self.heard):
                self.made = cached_rows(model, max(script.branches, key=len))
                self.deep_logits = [self._say_deep(model, call.rows[0]) for call in self.deep]
        self.features = branch_features(model, script.branches, self._features)
        self.sources = [model.made_of(hidden) for hidden in self.heard]
        self.scale = float(self.branches[0].std())
        self.read = {
            name: branch_features(model, [sample.tokens], {name: one})[0] for name, one in self._features.items()
        }

    def _say_rounded(self, model: Any) -> None:
        tokens = self.sample.tokens
        self.full = checkpoint_logits(model, tokens)
        with entries_rounded(model, self._contract, self.factors):
            self.rounded = checkpoint_logits(model, tokens)
        with entries_rounded(model, self._contract, self.factors, disturbed=True):
            self.rounded_noise = apart(self.rounded, checkpoint_logits(model, tokens))

    def _say_branches(self, model: Any, script: Script) -> list[Tensor]:
        if not self.heard:
            return branch_logits(model, script.branches)
        found: dict[int, Tensor] = {}
        for row, hidden in enumerate(self.heard):
            own = [number for number, place in enumerate(script.rows) if place == row]
            with model.given(hidden):
                found |= zip(own, branch_logits(model, [script.branches[number] for number in own]), strict=True)
        return [found[number] for number in range(len(script.branches))]

    def _say_deep(self, model: Any, call: RowCall) -> Tensor:
        found: dict[int, Tensor] = {}
        for path in leaves_of(call.parents[: call.real]):
            rows = (made[:, :, self.order % made.shape[2]] for made in self.made)
            logits = continued_logits(model, rows, [call.tokens[node] for node in path])
            found |= zip(path, logits, strict=True)
        return torch.stack([found[node] for node in range(call.real)])


def _deep_calls(contract: Contract, token_count: int, window: int | None) -> list[Call]:
    """Put a line and a tree far into a long sequence: at the last positions if that much cache is affordable, and past
    the sliding window in any case."""
    affordable = max(DEEP_CACHE_BYTES // contract.cache_bytes_per_token, (window or 0) + 8)
    start = min(contract.max_length - 3, affordable)
    padding = max(0, start + 5 - contract.max_length)
    random = Random(SEED)
    tokens = [random.randrange(token_count) for _ in range(5)]
    tree, _ = random_tree(random, 5, deepest=2)  # whose last entries lie beyond the last position
    calls = {
        "deep cache": RowCall(tokens, start, padding, line_of(5), []),
        "deep tree": RowCall(tokens, start, 0, tree, []),
    }
    return [Call(scenario, 0, [row]) for scenario, row in calls.items()]


def given_the_first(model: Any, sources: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Let a model that needs a source say texts of the first."""
    return model.given(sources[0]) if sources else nullcontext()


@torch.no_grad()
def checkpoint_logits(model: Any, tokens: list[int]) -> Tensor:
    """Compute the logits `[L, V]` of the model in torch."""
    with computing_in_float32(model):
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()


@torch.no_grad()
def branch_logits(model: Any, branches: list[list[int]]) -> list[Tensor]:
    """Compute the logits `[length, V]` of each token sequence in plain passes, without a cache."""
    found: dict[int, Tensor] = {}
    with computing_in_float32(model):
        for group in _of_like_lengths([len(branch) for branch in branches]):
            longest = len(branches[group[-1]])
            padded = torch.zeros(len(group), longest, dtype=torch.int64)  # causal: what follows a sequence is unseen
            for row, number in enumerate(group):
                padded[row, : len(branches[number])] = torch.tensor(branches[number])
            logits = model(padded, use_cache=False).logits
            found |= {number: logits[row, : len(branches[number])] for row, number in enumerate(group)}
    return [found[number] for number in range(len(branches))]


def _of_like_lengths(lengths: list[int]) -> list[list[int]]:
    """Group the numbers of these lengths, shortest first, so that none is padded by more than a third of its own."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and 3 * lengths[number] <= 4 * lengths[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


@torch.no_grad()
def branch_features(model: Any, branches: list[list[int]], features: Mapping[str, Features]) -> list[Tensor]:
    """Compute the features `[length, size]` of each token sequence that heads read; none where there are no heads."""
    found = []
    for branch in branches if features else ():
        hidden, _ = hidden_states(model, torch.tensor([branch]))
        with ExitStack() as stack:
            for one in features.values():
                stack.enter_context(computing_in_float32(one))
            found.append(all_features(features.values(), hidden)[0])
    return found


@torch.no_grad()
def hidden_states(model: Any, tokens: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Return what a model makes of token windows [B, S]: its hidden states by number, and its logits [B, S, V].

    They are transformers' own, not those that a trace notes.
    """
    with computing_in_float32(model):
        said = model(tokens, use_cache=False, output_hidden_states=True)
        read = states_read(model, tokens, said)
    numbered = {number: hidden.float() for number, hidden in enumerate(read)}
    return numbered | {LAST: read[-1].float()}, said.logits.float()


def states_read(model: Any, tokens: Tensor, said: Any) -> tuple[Tensor, ...]:
    """Return what each layer has read, and the last state, normed; Mamba-2's list begins after its first layer."""
    listed: tuple[Tensor, ...] = said.hidden_states
    if model.config.model_type != "mamba2":
        return listed
    return (model.get_input_embeddings()(tokens), *listed[:-2], listed[-1])


@torch.no_grad()
def cached_rows(model: Any, tokens: list[int]) -> list[Tensor]:
    """Return the rows that a model caches of these tokens, in float32: key_0, value_0, key_1, …"""
    with computing_in_float32(model):
        cache = model(torch.tensor([tokens]), use_cache=True).cache
    kept = [layer for layer in cache.layers if layer.keys is not None]  # the others ask the keys of one of these
    return [rows.float() for layer in kept for rows in (layer.keys, layer.values)]


@torch.no_grad()
def continued_logits(model: Any, rows: Iterable[Tensor], tokens: list[int]) -> Tensor:
    """Compute the logits `[len(tokens), V]` after a cache that already holds these rows: key_0, value_0, key_1, …"""
    from transformers import DynamicCache

    decoder = model.config.is_encoder_decoder  # whose configuration counts the encoder's layers, not the decoder's
    cache = DynamicCache(config=None if decoder else model.config)
    each = iter(rows)
    for layer, (key, value) in enumerate(zip(each, each, strict=True)):
        cache.update(key, value, layer)
    with computing_in_float32(model):
        logits: Tensor = model(torch.tensor([tokens]), cache=cache, use_cache=True).logits[0]
    return logits


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Widen each layer's weights while it runs, and only then, so that a half-precision model needs no second copy.

    Those of a convolution belong to the recurrent layer around it, which reads them itself, and so do those that the
    module around them reads or asks for their dtype.
    """
    hooks = []
    for module in model.modules():
        asked = ASKED.get(type(module).__name__, "wo")
        read = [one for name, one in module.named_children() if isinstance(one, nn.Conv1d) or name == asked]
        for owner in (module, *read):
            narrow = {name: weight for name, weight in owner._parameters.items() if _is_narrow(weight)}
            if narrow:
                hooks.append(module.register_forward_pre_hook(lambda *_, owner=owner: _widen(owner)))
                hooks.append(
                    module.register_forward_hook(lambda *_, owner=owner, narrow=narrow: _restore(owner, narrow))
                )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_narrow(weight: nn.Parameter | None) -> bool:
    return weight is not None and weight.dtype in (torch.float16, torch.bfloat16)


def _widen(module: nn.Module) -> None:
    for name, weight in module._parameters.items():
        if weight is not None:
            module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)


def _restore(module: nn.Module, narrow: dict[str, nn.Parameter]) -> None:
    module._parameters.update(narrow)
