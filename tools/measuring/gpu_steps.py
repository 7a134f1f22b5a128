"""What steps and rounds of a bundle launch on a GPU in the engine `torch`, counted by running them without data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low

import torch
from torch import Tensor, fx

from ...engines import Bundle, Engine, Step, blank_cache, blank_step
from ...engines.bundle import TARGET
from ...engines.torch import TorchEngine
from ...engines.torch.kernels import LAUNCHES
from ...runtime import SamplingParams
from ...runtime.acceptance.seat import make_rows
from ...runtime.drafters import Resources, open_drafters, usual_drafter
from ...runtime.memory.bucket import SHORTEST
from ...runtime.memory.model import Model
from ...runtime.round.result import tabulate
from ...runtime.round.round import run_round
from ...runtime.scheduling.planning import make_plan
from ...runtime.state.asked import Share
from ...runtime.state.clock import Clock
from ...runtime.state.frame import Frame
from ...runtime.state.shapes import line
from .gpu_launches import Launch, Launches, memory_of

NOWHERE = "meta"


@dataclass(frozen=True)
class Counted:
    """What a step or a round launches."""

    launches: tuple[Launch, ...]
    kernels_per_layer: int | None = None  # None where fewer than two layers keep something
    begins: tuple[int, ...] = ()  # of each layer that keeps something: its first kernel that takes of that


class WeightlessEngine(Engine):
    """Runs the graphs that the engine `torch` would run on a GPU, on tensors without data."""

    device = NOWHERE
    static_capacity = reads_prefixes = True

    def __init__(self, bundle: Bundle, name: str) -> None:
        contract = bundle.models[name].contract
        self._engine = TorchEngine(bundle.graph(name), contract, "cpu", compiled=False, weightless=True)
        self.contract, self.logits_dtype = self._engine.contract, self._engine.logits_dtype

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        module = self._engine.converted(self.contract.sizes({**inputs, **outputs}))
        graph = fx.GraphModule({name: tensor.to(NOWHERE) for name, tensor in module.named_buffers()}, module.graph)
        given = [inputs[spec.name] for spec in self.contract.inputs]
        wanted = [outputs[spec.name] for spec in self.contract.outputs if spec.name not in self.contract.aliases]

        return Step(inputs, outputs, lambda: graph(*given, *wanted))

    def step_bytes(self, rows: int, capacity: int) -> int:
        return self._engine.step_bytes(rows, capacity)

    def capturable(self) -> bool:
        return True

    def close(self) -> None:
        self._engine.close()


def count_step(engine: WeightlessEngine, batch: int, width: int, entries: int = SHORTEST) -> Counted:
    """Count a step of so many rows and tokens, all of which give logits, over the first entries of a cache."""
    contract, launches = engine.contract, Launches(LAUNCHES)
    cache = blank_cache(contract, batch, entries, NOWHERE)
    step = blank_step(engine, cache, 0, batch, width, width)
    with torch.no_grad(), launches.counted():
        step.run()
    layers: dict[str, int] = {}  # where the first kernel is that takes something of a layer
    for state in contract.kept:
        place = launches.touched.get(memory_of(cache[state.name]))
        if place is not None:
            layer = state.name.rpartition("_")[2]
            layers[layer] = min(place, layers.get(layer, place))
    begins = sorted(layers.values())
    each = [after - before for before, after in pairwise(begins)]
    return Counted(tuple(launches.found), median_low(each) if each else None, tuple(begins))


def count_round(
    bundle: Bundle,
    engines: Mapping[str, WeightlessEngine],
    batch: int,
    draft_length: int,
    entries: int = SHORTEST,
) -> Counted:
    """Count a greedy round: its draft's steps, the step that verifies, and what decides and commits."""
    vocab_size = bundle.tokenizer.vocab_size
    models = {name: Model(engine, vocab_size, batch, bundle.capacity) for name, engine in engines.items()}
    target = models[TARGET]
    drafters = open_drafters(Resources(bundle, target, models, batch))[0] if draft_length else {}
    rows = make_rows(batch, bundle.capacity, vocab_size, len(drafters), NOWHERE)
    params = [SamplingParams(temperature=0)] * batch
    share = Share.of(line(draft_length), usual_drafter(bundle))
    plan = make_plan(params, [share] * batch, drafters, vocab_size=vocab_size, traced=False)
    plan = replace(plan, entries_read=min(entries, bundle.capacity))
    frame, rows, clock = Frame(plan, target), rows.view(batch), Clock(rows.length.device)
    launches = Launches(LAUNCHES)
    with torch.no_grad():
        for one in (Launches(LAUNCHES), launches):  # constants are made in the first
            with one.counted():
                tabulate(run_round(rows, plan, frame, bundle.capacity, clock), plan)
    return Counted(tuple(launches.found))
