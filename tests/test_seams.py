"""Drafters, shapes, filters, an engine, a graph's input, output and states that tests alone have work end to end."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from trt_spec.engines import (
    CAPABILITIES,
    ENGINES,
    Bundle,
    BundleError,
    Capability,
    Contract,
    ContractError,
    EngineError,
    EngineKind,
    RequestError,
    Step,
    TensorSpec,
    blank_cache,
    make_step,
    open_engine,
)
from trt_spec.engines.onnxruntime import open_engines as open_onnxruntime
from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.runtime.acceptance.checks import require, whole
from trt_spec.runtime.acceptance.filters import FILTERS, Change, Cut
from trt_spec.runtime.drafters import DRAFTERS, Copier, Drafter, Offer, Resources, Sampler
from trt_spec.runtime.state.proposal import ProposedTokens
from trt_spec.runtime.state.rows import Columns
from trt_spec.runtime.state.shapes import FORMS, Branch, Levels, Shape
from trt_spec.tools.cli import main
from trt_spec.tools.flags import controller

from .kit.bundles import Pair, save_graph
from .kit.toys import Toy, with_toys

PROMPTS = [[5, 6, 7, 8], [9, 30, 9, 31, 9], [40]]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
COUPLED = replace(GREEDY, temperature=1.0, rule="coupled", seed=6)
SAMPLED = replace(GREEDY, temperature=1.0, seed=6)


def texts(
    decoder: Decoder, params: SamplingParams, draft_length: int | str = 0, drafter: str = "model"
) -> list[list[int]]:
    outputs = decoder.generate(PROMPTS, params, draft_length=draft_length, drafter=drafter)
    return [list(output.token_ids) for output in outputs]


@torch.inference_mode()
def greedy_by(pair: Pair, change: Callable[[Tensor, list[int]], None]) -> list[list[int]]:
    """What transformers says when the logits after each context are changed before the best token is taken."""
    found = []
    for prompt in PROMPTS:
        context = list(prompt)
        while len(context) < len(prompt) + GREEDY.max_new_tokens:
            logits = pair.reference(torch.tensor([context])).logits[0, -1]
            change(logits, context)
            context.append(int(logits.argmax()))
        found.append(context[len(prompt) :])
    return found


# Drafters.


class Again(Copier):
    """What came out for the same prompt before."""

    name = "again"
    reads_outputs = True

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._tokens = torch.zeros(resources.max_batch, 16, dtype=torch.int64, device=resources.target.engine.device)

    def ready(self, request: Any, most: int, turn: int) -> int:
        return len(self._next(request)[:most])

    def load(self, requests: Sequence[Any], draft_length: int) -> None:
        for row, request in enumerate(requests):
            tokens = self._next(request)[:draft_length]
            self._tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)

    def ended(self, request: Any) -> None:
        self._known[request.prompt] = request.token_ids

    def forget(self) -> None:
        self._known.clear()

    def offer(self, rows: Any, plan: Any, frame: Any, noise: Any, span: int) -> Callable[[int], Offer]:
        return lambda line: Offer(self._tokens[: plan.batch, : plan.draft_length], self.asked(line, rows))

    def _next(self, request: Any) -> list[int]:
        return self._known.get(request.prompt, [])[len(request.token_ids) :]


class Successor(Sampler):
    """Each token makes the one with the next number likely."""

    name = "successor"

    def logits(self, rows: Any, frame: Any, line: Any) -> Callable[[int], Tensor]:
        def of_proposal(i: int) -> Tensor:
            before = line.winners[i - 1].tokens if i else frame.recent[:, -1:]
            blank = torch.zeros_like(frame.draft_logits)
            return blank.scatter(2, ((before + 1) % blank.shape[2])[:, :, None], 1.0)

        return of_proposal


class Elsewhere(Successor):
    name = "elsewhere"

    @classmethod
    def unavailable(cls, resources: Resources) -> str:
        return "drafter elsewhere is not to be had here; use drafter successor"


@pytest.fixture
def drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Again, Successor, Elsewhere):
        monkeypatch.setitem(DRAFTERS, kind.name, kind)
    monkeypatch.setattr(controller, "DRAFTER_NAMES", tuple(DRAFTERS))  # as they are named for the command line


@pytest.mark.parametrize("params", [GREEDY, COUPLED])
@pytest.mark.parametrize("kind", [Again, Successor])
def test_an_added_drafter_proposes_and_changes_no_text(
    llama: Pair, drafters: None, kind: type[Drafter], params: SamplingParams
) -> None:
    with Decoder.open(llama.bundle) as decoder:
        expected = texts(decoder, params)
        assert texts(decoder, params, 4, kind.name) == expected
        assert 0 < decoder.speculation.accepted <= decoder.speculation.proposed
        assert (decoder.speculation.acceptance == 1) == (kind is Again), "it has seen these prompts end"
        requests = [
            decoder.submit(prompt, params, draft_length=3, drafter=name)
            for name in ("model", kind.name, "lookup")
            for prompt in PROMPTS
        ]
        while decoder.step():
            pass
        assert [request.token_ids for request in requests] == 3 * expected
        assert requests[3].speculation.proposed > 0


def test_an_added_drafter_forgets_what_ended_when_the_decoder_is_told_to(llama: Pair, drafters: None) -> None:
    with Decoder.open(llama.bundle) as decoder:
        texts(decoder, GREEDY)
        decoder.forget_outputs()
        texts(decoder, GREEDY, 4, Again.name)
        assert decoder.speculation.proposed == 0


def test_the_decoder_and_its_refusals_name_the_added_drafters(llama: Pair, drafters: None) -> None:
    with Decoder.open(llama.bundle) as decoder:
        assert decoder.drafters[-2:] == ("again", "successor")
        for asked, message in [
            (
                {"drafter": "oracle"},
                "drafter is 'oracle', .*, again, successor, elsewhere, none",
            ),
            ({"drafter": "elsewhere"}, "drafter elsewhere is not to be had here; use drafter successor"),
            ({"drafter": "again", "draft_length": EntropyRule()}, "drafter again has no entropy .* use .*or successor"),
        ]:
            with pytest.raises(RequestError, match=message):
                decoder.submit("x", **asked)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """`command("generate", …)` gives the JSON object that it prints."""

    def run(name: str, *arguments: object) -> Any:
        assert main([name, "--json", *map(str, arguments)]) == 0
        return json.loads(capfd.readouterr().out)

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def test_the_command_line_takes_the_added_drafter(
    llama: Pair, drafters: None, command: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    request = ("--bundle", llama.bundle, "--prompt", "def f(", "--max-new-tokens", 12, "--ignore-eos")
    plain = command("generate", *request, "--draft-length", 0)
    found = command("generate", *request, "--draft-length", 3, "--drafter", "successor")
    assert found["token_ids"] == plain["token_ids"]
    assert found["speculation"]["proposed"] > 0
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert " again successor elsewhere none mixed" in " ".join(capfd.readouterr().out.split())


# Shapes.


class Whisk(Shape):
    """A line, written 3:2, whose last token has so many others beside it, each followed by nothing or by two."""

    @property
    def levels(self) -> Levels:
        ends = tuple(Branch(0, 1 + number) for number in range(self.beyond))
        if self.leaves:
            return (tuple(Branch(self.length - 1, branch.rank) for branch in ends),)
        return *((),) * (self.length - 2), (Branch(0, 1),), tuple(Branch(1, rank) for rank in range(self.beyond - 1))


@pytest.fixture
def whisks(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves(length: int, beyond: int) -> Shape:
        return Whisk(f"{length}:{beyond}", length, beyond, leaves=True, fixed=True)

    def followed(length: int, beyond: int) -> Shape:
        return Whisk(f"{length}::{beyond}", length, beyond, fixed=True)

    monkeypatch.setitem(FORMS, r"\d+:\d+", leaves)
    monkeypatch.setitem(FORMS, r"\d+::\d+", followed)


@pytest.mark.parametrize("length", ["3:2", "3::3"])
def test_an_added_shape_proposes_and_changes_no_text(llama: Pair, whisks: None, length: str) -> None:
    with Decoder.open(llama.bundle) as decoder:
        for params in (GREEDY, COUPLED):
            expected = texts(decoder, params)
            assert texts(decoder, params, length) == expected
            requests = [
                decoder.submit(prompt, params, draft_length=k) for k in (length, "3+3", "4/8") for prompt in PROMPTS
            ]
            while decoder.step():
                pass
            assert [request.token_ids for request in requests] == 3 * expected
        [sampled] = decoder.generate(PROMPTS[:1], SAMPLED, draft_length=length, trace=True)
        places = {(one.place, one.after) for traced in sampled.trace for one in traced.siblings}
        assert places == ({(2, None)} if length == "3:2" else {(1, None), (2, 0)})
        with pytest.raises(RequestError, match="draft_length is 3:5, expected 1 to 16 levels, at most 4 children"):
            decoder.submit("x", SAMPLED, draft_length="3:5")


def test_the_command_line_takes_the_added_shape(llama: Pair, whisks: None, command: Callable[..., Any]) -> None:
    request = ("--bundle", llama.bundle, "--prompt", "def f(", "--max-new-tokens", 12, "--ignore-eos")
    plain = command("generate", *request, "--draft-length", 0)
    found = command("generate", *request, "--draft-length", "3:2", "--trace")
    assert found["token_ids"] == plain["token_ids"]
    assert max(len(one["siblings"]) for one in found["trace"]) == 2


# Filters.


class NeverAfter(Change):
    """Of a pair of tokens the second never follows the first."""

    fields: ClassVar = {"never_after": "a pair of tokens of which the second may not follow the first"}
    reads_proposals = True

    def check(self, params: SamplingParams) -> None:
        pair = params.extra.get("never_after", (0, 0))
        sound = isinstance(pair, Sequence) and len(pair) == 2 and all(whole(token, 0) for token in pair)
        require("never_after", pair, sound, "two token ids")

    def active(self, params: SamplingParams) -> bool:
        return "never_after" in params.extra

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        names = ("said", "first", "second")
        return {name: torch.zeros(rows, dtype=torch.int64, device=device) for name in names}

    def admit(self, columns: Columns, row: int, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        columns["said"][row] = prompt[-1]
        columns["first"][row], columns["second"][row] = params.extra.get("never_after", (-1, -1))

    def apply(self, scores: Tensor, columns: Columns, ahead: ProposedTokens | None) -> Tensor:
        assert ahead is not None
        before = torch.cat([columns["said"][:, None], ahead.tokens], 1)[:, -scores.shape[1] :]  # [A, W]
        token = torch.arange(scores.shape[2], device=scores.device)
        after_first = (before == columns["first"][:, None])[:, :, None]
        return scores.masked_fill(after_first & (token == columns["second"][:, None, None]), -torch.inf)

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        columns["said"].copy_(tokens.gather(1, accepted[:, None])[:, 0])


class AtMost(Cut):
    """Top-k by another name."""

    fields: ClassVar = {"at_most": "keep so many of the likeliest tokens"}

    def check(self, params: SamplingParams) -> None:
        count = params.extra.get("at_most", 1)
        require("at_most", count, whole(count, 1), "a whole number >= 1")

    def active(self, params: SamplingParams) -> bool:
        return "at_most" in params.extra

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        return {"at_most": torch.zeros(rows, dtype=torch.int64, device=device)}

    def admit(self, columns: Columns, row: int, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        columns["at_most"][row] = params.extra.get("at_most", vocab_size)

    def threshold(self, ordered: Tensor, kept: Tensor, columns: Columns) -> Tensor:
        place = (ordered.shape[2] - columns["at_most"])[:, None, None]
        return ordered.gather(2, place.expand(-1, ordered.shape[1], 1))


@pytest.fixture
def filters() -> Iterator[None]:
    FILTERS.extend([NeverAfter(), AtMost()])
    yield
    del FILTERS[-2:]


def pairs_in(tokens: Sequence[int]) -> set[tuple[int, int]]:
    return set(pairwise(tokens))


def test_an_added_change_means_under_speculation_what_it_means_to_transformers(llama: Pair, filters: None) -> None:
    with Decoder.open(llama.bundle) as decoder:
        plain = texts(decoder, GREEDY)
        first, second = plain[0][3:5]

        def forbid(logits: Tensor, context: list[int]) -> None:
            if context[-1] == first:
                logits[second] = -torch.inf

        expected = greedy_by(llama, forbid)
        assert expected[0] != plain[0]
        banned = replace(GREEDY, extra={"never_after": (first, second)})
        for draft_length, drafter in ((0, "none"), *((4, name) for name in decoder.drafters)):
            assert texts(decoder, banned, draft_length, drafter) == expected, drafter
        assert decoder.speculation.accepted > 0
        for params in (COUPLED, SAMPLED):
            pair = max(pairs_in(texts(decoder, replace(params, max_new_tokens=200))[0]))
            said = texts(decoder, replace(params, max_new_tokens=200, extra={"never_after": pair}), 4)
            assert not any(pair in pairs_in(tokens) for tokens in said)


def test_an_added_cut_is_the_one_it_imitates_and_leaves_neighbours_alone(llama: Pair, filters: None) -> None:
    with Decoder.open(llama.bundle) as decoder:
        for params in (COUPLED, SAMPLED):
            plain, expected = texts(decoder, params, 3), texts(decoder, replace(params, top_k=2), 3)
            cut = replace(params, extra={"at_most": 2})
            assert texts(decoder, cut, 3) == expected != plain
            together = decoder.generate(2 * PROMPTS, [cut] * 3 + [params] * 3, draft_length=3, drafter="model")
            assert [list(output.token_ids) for output in together] == expected + plain


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"never_after": (1, "b")}, r"never_after is \(1, 'b'\), expected two token ids"),
        ({"at_most": 0}, "at_most is 0, expected a whole number >= 1"),
        (
            {"at_least": 1},
            r"extra is .*, expected a mapping with no keys but \['at_most', 'forced_end', 'never_after', 'speech'\]",
        ),
    ],
)
def test_the_parameters_of_added_filters_are_checked_by_them(
    filters: None, extra: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(extra=extra)


def test_the_command_line_takes_the_parameters_of_added_filters(
    llama: Pair, filters: None, command: Callable[..., Any]
) -> None:
    request = ("--bundle", llama.bundle, "--prompt", "def f(", "--max-new-tokens", 12, "--temperature", 1, "--seed", 3)
    plain, top, cut = (command("generate", *request, *more) for more in ((), ("--top-k", 2), ("--extra", "at_most=2")))
    assert cut["token_ids"] == top["token_ids"] != plain["token_ids"]


# An engine.


class CountingEngine:
    """Another engine that counts its runs."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.runs = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        step = self._engine.step(inputs, outputs)

        def run() -> None:
            self.runs += 1
            step.run()

        return replace(step, run=run)


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str, exact_weights: bool, alone: bool
) -> list[CountingEngine]:
    assert name == "counting"
    return [CountingEngine(one) for one in open_onnxruntime(name, models, device, exact_weights, alone)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = EngineKind("counting", "what onnxruntime runs", __name__, ("onnxruntime",), (), {"cpu": ("cpu",)})
    monkeypatch.setitem(ENGINES, kind.name, kind)


def test_an_added_engine_says_what_the_one_within_it_says(
    llama: Pair, engine: None, command: Callable[..., Any]
) -> None:
    with Decoder.open(llama.bundle) as decoder:
        expected = texts(decoder, COUPLED)
    with Decoder.open(llama.bundle, engine="counting") as decoder:
        for draft_length, drafter in ((0, "none"), (4, "model"), (4, "cascade")):
            assert texts(decoder, COUPLED, draft_length, drafter) == expected
        assert isinstance(decoder.target.engine, CountingEngine)
        assert decoder.target.engine.runs > decoder.speculation.rounds / len(PROMPTS)
        assert decoder.draft is not None
        assert decoder.draft.engine.runs > 0
    request = ("--bundle", llama.bundle, "--prompt", "def f(", "--max-new-tokens", 12)
    plain, counted = (command("generate", *request, *more) for more in ((), ("--engine", "counting")))
    assert counted["token_ids"] == plain["token_ids"]
    with pytest.raises(EngineError, match=r"there is no engine 'abacus'; this version has: .*tensorrt, counting"):
        Decoder.open(llama.bundle, engine="abacus")


# An input and an output of a graph.

LIFTED, BY = 7, 4.0  # a token, and what the graph adds to its logit times the input


def lift_every_other(inputs: Mapping[str, Tensor]) -> None:
    """Where the context so far has an even number of tokens."""
    last = inputs["start"][:, None] + inputs["logit_rows"]
    inputs["lift"].copy_(last % 2)


ADDED = {
    "lift": Capability(inputs=(TensorSpec("lift", "float32", ("batch", "rows")),), fill=lift_every_other),
    "features": Capability(outputs=(TensorSpec("features", "float32", ("batch", "rows", 32)),)),
}


def maker(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(node for node in graph.node if name in node.output)


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]


def add_lift(graph: onnx.GraphProto) -> None:
    """logits += lift * BY at the token LIFTED."""
    rename(graph, "logits", "logits_before")
    vocab = graph.output[0].type.tensor_type.shape.dim[2].dim_value
    which = np.zeros(vocab, np.float32)
    which[LIFTED] = BY
    graph.initializer.extend([numpy_helper.from_array(which, "which"), numpy_helper.from_array(np.array([2]), "last")])
    graph.input.append(helper.make_tensor_value_info("lift", TensorProto.FLOAT, ["batch", "rows"]))
    graph.node.extend(
        [
            helper.make_node("Unsqueeze", ["lift", "last"], ["lift_wide"], "lift_wide"),
            helper.make_node("Mul", ["lift_wide", "which"], ["lifted"], "lifted"),
            helper.make_node("Add", ["logits_before", "lifted"], ["logits"], "logits"),
        ]
    )


def add_features(graph: onnx.GraphProto) -> None:
    """What the head of the model multiplies."""
    head = maker(graph, "logits")
    while head.op_type != "MatMul":
        head = maker(graph, head.input[0])
    rename(graph, head.input[0], "features")
    graph.output.append(helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", "rows", 32]))


ADD = {"lift": add_lift, "features": add_features}


def rewritten(pair: Pair, folder: Path, add: Sequence[str], listed: Sequence[str]) -> Path:
    """The bundle with a target whose graph has these capabilities and whose contract lists those."""
    shutil.copytree(pair.bundle, folder, dirs_exist_ok=True)
    model = onnx.load(folder / "target" / "model.onnx")
    for name in add:
        ADD[name](model.graph)
    save_graph(model, folder, "target")
    bundle = Bundle.open(pair.bundle)
    contract = bundle.target.contract
    target = replace(bundle.target, contract=replace(contract, capabilities=(*contract.capabilities, *listed)))
    replace(bundle, path=folder, models=bundle.models | {"target": target}).save()
    return folder


@pytest.fixture
def capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, capability in ADDED.items():
        monkeypatch.setitem(CAPABILITIES, name, capability)


def lift(logits: Tensor, context: list[int]) -> None:
    logits[LIFTED] += BY * (len(context) % 2 == 0)


@pytest.mark.parametrize("engine_name", ["onnxruntime", "torch"])
def test_an_added_input_is_filled_and_an_added_output_read_in_every_round(
    llama: Pair, tmp_path: Path, capabilities: None, engine_name: str
) -> None:
    bundle = rewritten(llama, tmp_path, list(ADDED), list(ADDED))
    expected = greedy_by(llama, lift)
    assert expected != greedy_by(llama, lambda logits, context: None)
    with Decoder.open(bundle, engine=engine_name) as decoder:
        for draft_length, drafter in ((0, "none"), (1, "model"), (4, "model"), (4, "lookup"), (3, "cascade")):
            assert texts(decoder, GREEDY, draft_length, drafter) == expected, drafter
        assert texts(decoder, COUPLED, 4) == texts(decoder, COUPLED)
        texts(decoder, GREEDY, 4)
        frame = decoder.last_frame
        assert frame is not None
        features, lifts = frame.verify.outputs["features"], frame.verify.inputs["lift"]
        head = llama.reference.lm_head.weight.detach()
        logits = features @ head.T
        logits[..., LIFTED] += BY * lifts
        assert features.shape[1] == 5
        assert set(lifts.flatten().tolist()) == {0.0, 1.0}
        assert logits == pytest.approx(frame.target_logits, abs=1e-3), "float32 products in another order"


@pytest.mark.parametrize("engine_name", ["onnxruntime", "torch"])
def test_an_added_input_that_the_caller_brings_is_not_filled(
    llama: Pair, tmp_path: Path, capabilities: None, engine_name: str
) -> None:
    bundle = Bundle.open(rewritten(llama, tmp_path, ["lift"], ["lift"]))
    contract = bundle.target.contract
    engine = open_engine(engine_name, bundle.graph("target"), contract)

    def logits_of(**brought: Tensor) -> Tensor:
        inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "start": torch.zeros(1, dtype=torch.int64)}
        logits = torch.zeros(1, 2, contract.vocab_size)
        make_step(engine, blank_cache(contract, 1, 64), inputs | brought, {"logits": logits}).run()
        return logits

    plain = logits_of(lift=torch.zeros(1, 2))
    for lifts, found in (
        ([1.0, 0.0], logits_of()),
        ([-2.0, 3.0], logits_of(lift=torch.tensor([[-2.0, 3.0]]))),
    ):
        difference = torch.zeros_like(plain)
        difference[0, :, LIFTED] = BY * torch.tensor(lifts)
        assert (found - plain) == pytest.approx(difference, abs=1e-4)
    engine.close()


@pytest.mark.parametrize("engine_name", ["onnxruntime", "torch"])
@pytest.mark.parametrize(
    ("name", "unlisted", "missing"),
    [
        (
            "lift",
            "has the input 'lift', which its contract does not know",
            "has no input 'lift', its contract promises",
        ),
        (
            "features",
            "has the output 'features', which its contract does not know",
            r"has no output 'features', its contract promises features float32\[batch, rows, 32\]",
        ),
    ],
)
def test_graph_and_contract_must_agree_on_what_was_added(
    llama: Pair, tmp_path: Path, capabilities: None, engine_name: str, name: str, unlisted: str, missing: str
) -> None:
    for folder, add, listed, message in (("a", [name], [], unlisted), ("b", [], [name], missing)):
        bundle = rewritten(llama, tmp_path / folder, add, listed)
        with pytest.raises(ContractError, match=message):
            Decoder.open(bundle, engine=engine_name)


def test_a_bundle_with_a_capability_of_another_version_is_refused(
    llama: Pair, tmp_path: Path, capabilities: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = rewritten(llama, tmp_path, ["lift"], ["lift"])
    monkeypatch.delitem(CAPABILITIES, "lift")
    with pytest.raises(BundleError, match="lists the capability 'lift', which this version does not know"):
        Decoder.open(bundle)


# States of a graph.

LENGTHS = [(0, "none"), (1, "model"), (4, "model"), (4, "lookup"), ("3+2", "model"), ("3/9", "model"), (3, "cascade")]


def greedy_of(toy: Toy, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    found = []
    for prompt in prompts:
        context = list(prompt)
        while len(context) < len(prompt) + tokens:
            context.append(int(toy.logits(context).argmax()))
        found.append(context[len(prompt) :])
    return found


@pytest.mark.parametrize(
    ("engine_name", "toy", "lengths"),
    [
        ("onnxruntime", Toy(), LENGTHS),
        ("torch", Toy(), LENGTHS),
        ("onnxruntime", Toy(summary=False), LENGTHS),
        ("openvino", Toy(features=False, summary=False), LENGTHS[:4]),
    ],
    ids=["onnxruntime, all states", "torch, all states", "onnxruntime, no state per row", "openvino, keys and values"],
)
def test_states_of_other_shapes_and_kinds_are_kept_in_every_round(
    llama: Pair, tmp_path: Path, engine_name: str, toy: Toy, lengths: list[tuple[Any, str]]
) -> None:
    """Values larger than keys, features of each token and a summary of each row; requests come, go and move."""
    bundle = with_toys(llama, tmp_path / "toys", toy)
    prompts = [*PROMPTS, [3, 1, 4, 1, 5, 9, 2, 6] * 5]
    expected = greedy_of(toy, prompts, 30)
    with Decoder.open(bundle, engine=engine_name, max_batch=3) as decoder:
        for draft_length, drafter in lengths:
            requests = [
                decoder.submit(
                    prompt, replace(GREEDY, max_new_tokens=30 - 7 * i), draft_length=draft_length, drafter=drafter
                )
                for i, prompt in enumerate(prompts)
            ]
            while decoder.step():
                pass
            for i, request in enumerate(requests):
                assert request.token_ids == expected[i][: 30 - 7 * i], (draft_length, drafter)
        assert texts(decoder, COUPLED, 4) == texts(decoder, COUPLED)
        assert 0.2 < decoder.speculation.acceptance < 1


def test_what_a_row_has_absorbed_is_not_found_by_others(llama: Pair, tmp_path: Path) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 16
    for toy, found in ((Toy(), 0), (Toy(summary=False), 64)):
        bundle = with_toys(llama, tmp_path / str(found), toy)
        expected = greedy_of(toy, [prompt], 8)[0]
        with Decoder.open(bundle, prefix_bytes=2**20) as decoder:
            outputs = [decoder.generate(prompt, replace(GREEDY, max_new_tokens=8))[0] for _ in range(2)]
        assert [output.usage.cached_tokens for output in outputs] == [0, found]
        assert [list(output.token_ids) for output in outputs] == [expected, expected]


def test_an_engine_and_a_draft_refuse_by_name_the_states_that_they_cannot_keep(llama: Pair, tmp_path: Path) -> None:
    for toy, message in (
        (
            Toy(),
            "openvino takes no state of the kind 'row', .*model.onnx has summary .* per row; use engine onnxruntime",
        ),
        (
            Toy(summary=False),
            "its state features .* per token is not the keys or values of an attention; use engine onnxruntime",
        ),
    ):
        with pytest.raises(EngineError, match=message):
            Decoder.open(with_toys(llama, tmp_path / str(toy.summary), toy), engine="openvino")
    bundle = Bundle.open(tmp_path / "True")
    absorbing = replace(bundle, models=bundle.models | {"draft": replace(bundle.target, kind="draft")})
    with pytest.raises(BundleError, match=r"the draft with summary .* per row, which could not be taken back"):
        Decoder.open(absorbing)
