"""ONNX Runtime writes the cache in place, keeps to its rows, and says in a sentence when memory is missing."""

import concurrent.futures as futures
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from trt_spec.engines import Bundle, Engine, EngineError, blank_cache, blank_step, make_step, open_engine, usable_cores
from trt_spec.engines.onnxruntime import GPU, Threads, nodes_elsewhere, open_session, share_threads
from trt_spec.export import export_bundle
from trt_spec.export.pipeline import model as export_model
from trt_spec.export.writing.graph import write_fused
from trt_spec.runtime import Decoder
from trt_spec.runtime.memory.tokens import Tokens

from ..kit.bundles import Pair, export_pair, without_fused
from ..kit.models import tiny_llama
from ..kit.steps import feed, model_of

NOT_IN_PLACE = "in-place optimization not activated"


def in_a_process_of_its_own(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def engine(llama: Pair):
    bundle = Bundle.open(llama.bundle)
    return open_engine("onnxruntime", bundle.graph("target"), bundle.target.contract)


def test_the_first_session_leaves_the_thread_as_it_was(llama: Pair):
    opening = """
        import sys, torch
        from trt_spec.engines import Bundle, open_engine
        bundle = Bundle.open(sys.argv[1])
        engine = open_engine("onnxruntime", bundle.graph("target"), bundle.target.contract)
        print(bool(torch.tensor(1e-40) * 1.0))
        """
    assert in_a_process_of_its_own(opening, llama.bundle).stdout == "True\n"


def test_what_is_nearly_nothing_is_nothing_while_it_computes_and_no_longer(llama: Pair):
    """Such numbers are slow: shares of attention on long texts. Torch keeps them, whatever thread runs a step."""

    def survives() -> bool:
        return bool(torch.tensor(1e-40) * 1.0)

    opened = Bundle.open(llama.bundle)
    engine = open_engine("onnxruntime", opened.graph("target"), opened.target.contract)
    assert engine._session.get_session_options().get_session_config_entry("session.set_denormal_as_zero") == "1"
    step = blank_step(engine, blank_cache(engine.contract, 1, 64), 0, 1, 2, 2)
    seen, session = [], engine._session

    class Watched:
        def io_binding(self):
            return session.io_binding()

        def run_with_iobinding(self, *given: object) -> None:
            seen.append(survives())
            session.run_with_iobinding(*given)

    engine._session = Watched()
    step = engine.step(step.inputs, step.outputs)
    with futures.ThreadPoolExecutor(1) as pool:
        for run in (step.run, lambda: pool.submit(step.run).result()):
            run()
            assert survives()
        assert pool.submit(survives).result()
    assert seen == [False, False]
    engine._session = session
    engine.close()


def test_a_step_writes_its_own_cache_entries_and_no_others(engine):
    model = model_of(engine, 4)
    feed(model, 1, [5, 6, 7], 10)
    for buffer in model.cache.buffers.values():
        changed = (buffer != 7.0).any(-1).any(1)  # [rows, T]
        assert changed[1, 10:13].all()
        assert changed.sum() == 3


def test_a_batched_step_writes_each_row_at_its_own_start(engine):
    model = model_of(engine, 3)
    step = blank_step(engine, model.cache.buffers, 0, 3, 2, 2)
    step.input_ids.copy_(torch.tensor([[3, 4], [5, 6], [7, 8]]))
    step.start.copy_(torch.tensor([0, 9, 62]))
    step.run()
    for buffer in model.cache.buffers.values():
        changed = (buffer != 7.0).any(-1).any(1)
        assert [row.nonzero().flatten().tolist() for row in changed[:3]] == [[0, 1], [9, 10], [62, 63]]


def test_the_logits_are_those_of_the_rows_asked_for(engine):
    model = model_of(engine, 1)
    every = blank_step(engine, model.cache.buffers, 0, 1, 5, 5)
    every.input_ids.copy_(torch.tensor([[3, 4, 5, 6, 7]]))
    every.run()
    last = feed(model, 0, [3, 4, 5, 6, 7], 0)
    torch.testing.assert_close(last, every.logits[0, -1], atol=1e-5, rtol=0)  # the same sums in another order
    two = blank_step(engine, model.cache.buffers, 0, 1, 5, 2)
    two.input_ids.copy_(every.input_ids)
    two.run()
    torch.testing.assert_close(two.logits[0], every.logits[0, -2:], atol=1e-5, rtol=0)


def test_steps_may_share_the_callers_tensors(engine):
    """The start of one step may be a row of a larger tensor, and all steps may write one memory of logits."""
    model = model_of(engine, 2)
    starts = torch.tensor([[0, 0], [3, 3]])
    logits = torch.zeros(2, 1, engine.contract.vocab_size)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    model.step(Tokens(ids, starts[0]), logits).run()
    model.step(Tokens(ids[:, :1].contiguous(), starts[1]), logits).run()
    expected = feed(model, 1, [6, 7, 8, 6], 0)
    torch.testing.assert_close(logits[1, 0], expected, atol=1e-5, rtol=0)


def test_a_step_keeps_the_memory_it_was_made_on(engine):
    """Another cache is bound and the first is forgotten by its owner: the old step still writes to the old one."""
    model = model_of(engine, 1)
    step = blank_step(engine, model.cache.buffers, 0, 1, 1, 1)
    step.run()
    before = step.logits.clone()
    model = model_of(engine, 1)
    filler = [torch.full_like(buffer, 5.0) for buffer in model.cache.buffers.values()]  # takes freed memory, if any
    step.run()
    assert torch.equal(step.logits, before)
    assert all(bool((buffer == 7.0).all()) for buffer in model.cache.buffers.values())
    assert all(bool((buffer == 5.0).all()) for buffer in filler)


RUN_WITH_EVERY_MESSAGE = """
    import sys, torch, onnxruntime
    from pathlib import Path
    session = onnxruntime.InferenceSession
    def telling(graph, options, **more):
        options.log_severity_level = 0
        return session(graph, options, **more)
    onnxruntime.InferenceSession = telling
    from trt_spec.engines import Bundle, EngineError, blank_step, open_engine
    from trt_spec.runtime.memory.model import Model
    bundle = Bundle.open(sys.argv[1])
    engine = open_engine("onnxruntime", bundle.graph("target"), bundle.target.contract)
    model = Model(engine, engine.contract.vocab_size, 3, 64)
    model.cache.make_room(0, [0] * 3, [64] * 3)
    if sys.argv[2] == "copied":
        views, binds = {}, engine._session.io_binding
        class Apart:
            def __init__(self): self.binding = binds(); self.kept = []
            def bind_input(self, *a): self.binding.bind_input(*a)
            def bind_output(self, name, device, number, kind, shape, pointer):
                if name != "logits":
                    self.kept.append(torch.zeros(shape)); pointer = self.kept[-1].data_ptr()
                self.binding.bind_output(name, device, number, kind, shape, pointer)
        inner = engine._session
        class Session:
            def io_binding(self): return Apart()
            def run_with_iobinding(self, apart, settings): inner.run_with_iobinding(apart.binding, settings)
        engine._session = Session()
    for first, batch, width in ((0, 3, 1), (1, 2, 5), (2, 1, 30)):
        blank_step(engine, model.cache.buffers, first, batch, width, 1).run()
    print(all(bool((buffer != 0).any()) for buffer in model.cache.buffers.values()))
"""


def test_the_cache_is_updated_in_place(llama: Pair):
    """ONNX Runtime says so when it is not; the second run proves that the message would have been seen."""
    shared = in_a_process_of_its_own(RUN_WITH_EVERY_MESSAGE, llama.bundle, "shared")
    assert shared.returncode == 0, shared.stderr[-2000:]
    assert shared.stdout.endswith("True\n")
    assert len(shared.stderr) > 1000, "every message must be on"
    assert NOT_IN_PLACE not in shared.stderr
    apart = in_a_process_of_its_own(RUN_WITH_EVERY_MESSAGE, llama.bundle, "copied")
    assert apart.returncode == 0, apart.stderr[-2000:]
    assert NOT_IN_PLACE in apart.stderr
    assert apart.stdout.endswith("False\n")


def test_no_memory_for_a_cache_is_said_in_a_sentence_and_the_next_request_works(llama: Pair):
    """Address space is limited in a process of its own, to 200 MiB more than it has; the cache would take gigabytes."""
    done = in_a_process_of_its_own(
        """
        import resource, sys
        from trt_spec.runtime import Decoder, EngineError, SamplingParams
        decoder = Decoder.open(sys.argv[1])
        params = SamplingParams(max_new_tokens=5)
        [before] = decoder.generate([[5, 6, 7]], params)
        contract = decoder.target.engine.contract
        wanted = contract.cache_bytes_per_token * 8 * 64
        import torch
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, resource.RLIM_INFINITY))
        try:
            decoder.target.cache.make_room(0, [0] * 8, [10**6] * 8)
        except EngineError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        [after] = decoder.generate([[5, 6, 7]], params)
        print(before.token_ids == after.token_ids)
        """,
        llama.bundle,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    message, same = done.stdout.splitlines()
    assert message.startswith("no memory for a cache of 8 × ")
    assert "MiB; lower max_batch or the lengths of prompts and outputs" in message
    assert same == "True"


def test_a_missing_onnxruntime_names_the_extra_to_install(llama: Pair):
    done = in_a_process_of_its_own(
        """
        import sys
        sys.modules["onnxruntime"] = None
        from trt_spec.runtime import Decoder, EngineError
        try:
            Decoder.open(sys.argv[1])
        except EngineError as error:
            print(error)
        """,
        llama.bundle,
    )
    assert done.stdout == "engine onnxruntime needs the onnxruntime package; pip install 'trt-spec[cpu]'\n", done.stderr


def sized(folder: Path, *megabytes: int) -> list[Path]:
    """Graph files with weights of these sizes beside them, as holes that take no disk."""
    graphs = []
    for index, size in enumerate(megabytes):
        graph = folder / str(index) / "model.onnx"
        graph.parent.mkdir(parents=True)
        graph.touch()
        with graph.with_name("weights.bin").open("wb") as weights:
            weights.truncate(size * 2**20)
        graphs.append(graph)
    return graphs


def test_models_that_take_turns_never_spin_against_each_other(tmp_path: Path):
    """A worker that spins on while the other model runs doubles the other's time."""
    cores = usable_cores()
    large_awake, large_asleep, small = Threads(cores, True), Threads(cores, False), Threads(1, False)
    for sizes, expected in (
        ((57, 4), [large_awake, small]),
        ((300, 57), [large_asleep, large_asleep]),
        ((300,), [large_awake]),
        ((1, 1), [small, small]),
    ):
        assert share_threads(sized(tmp_path / str(sizes), *sizes)) == expected


def test_a_session_has_the_threads_of_its_share(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    import onnxruntime

    seen = []
    session = onnxruntime.InferenceSession

    def remember(graph: str, options, **more):
        seen.append(options)
        return session(graph, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", remember)
    graph = Bundle.open(llama.bundle).graph("draft")
    open_session(graph, Threads(3, stay_awake=False))
    open_session(graph, Threads(2, stay_awake=True))
    asleep, awake = seen
    assert (asleep.intra_op_num_threads, awake.intra_op_num_threads) == (3, 2)
    assert asleep.get_session_config_entry("session.force_spinning_stop") == "1"
    with pytest.raises(RuntimeError):
        awake.get_session_config_entry("session.force_spinning_stop")  # the library's default: it spins on


def test_the_engine_package_imports_no_heavy_library(tmp_path: Path):
    done = in_a_process_of_its_own(
        """
        import sys
        import trt_spec.runtime, trt_spec.engines
        heavy = ("onnxruntime", "onnx", "transformers", "onnxscript", "tensorrt")
        print([name for name in heavy if name in sys.modules])
        """
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_node_that_is_computed_elsewhere_is_named(llama: Pair):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    file = str(Bundle.open(llama.bundle).graph("target"))
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    assert nodes_elsewhere(session, "CPUExecutionProvider") == []
    named = nodes_elsewhere(session, GPU)
    assert sum(node.startswith("Attention '") for node in named) == 2
    assert not any(node.startswith("Shape ") for node in named)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("warp", "engine onnxruntime runs on the device cpu or cuda, not on 'warp'"),
        ("cuda", r"the onnxruntime package here has no CUDA; pip install 'trt-spec\[cuda\]' instead of \[cpu\]"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(llama: Pair, device: str, said: str):
    target = Bundle.open(llama.bundle)
    with (
        patch.object(onnxruntime, "get_available_providers", return_value=["CPUExecutionProvider"]),
        pytest.raises(EngineError, match=said),
    ):
        open_engine("onnxruntime", target.graph("target"), target.target.contract, device)


def test_a_decoder_on_a_gpu_that_is_not_here_is_refused(llama: Pair):
    with (
        patch.object(torch.cuda, "Stream", side_effect=RuntimeError("no driver")),
        pytest.raises(EngineError, match=r"device 'cuda' cannot be used \(no driver\); expected cpu or cuda"),
    ):
        Decoder.open(llama.bundle, device="cuda")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    """A model with heads of a size for which ONNX Runtime attends by an operator of its own, so and without."""
    folder = tmp_path_factory.mktemp("grouped")
    pair = export_pair(tiny_llama(folder / "checkpoint", head_dim=32), folder / "bundle")
    assert (pair.bundle / "target" / "onnxruntime.onnx").exists()
    both = (Bundle.open(one) for one in (pair.bundle, without_fused(pair.bundle, folder / "plain")))
    return [open_engine("onnxruntime", one.graph("target"), one.target.contract) for one in both]


def test_its_own_operators_run_where_the_library_has_them(grouped: list[Engine]) -> None:
    """Its attention takes chunks of unlike lengths since 1.32."""
    has = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 32)
    assert grouped[0].graph.name == ("onnxruntime.onnx" if has else "model.onnx")
    assert grouped[1].graph.name == "model.onnx"


def name_an_operator_of_tomorrow(node: onnx.NodeProto) -> None:
    node.op_type = "AttentionOfTomorrow"


def add_an_input_of_tomorrow(node: onnx.NodeProto) -> None:
    node.input.extend([node.input[0]] * (20 - len(node.input)))


TOMORROW = [name_an_operator_of_tomorrow, add_an_input_of_tomorrow]


def as_of_tomorrow(file: Path, change: Callable[[onnx.NodeProto], None]) -> None:
    """Make its attention one that only a later ONNX Runtime has."""
    model = onnx.load(file, load_external_data=False)
    change(next(node for node in model.graph.node if node.op_type == "GroupQueryAttention"))
    onnx.save(model, file)


@pytest.mark.parametrize("change", TOMORROW)
def test_a_graph_of_operators_that_an_older_library_does_not_know_is_left_for_that_of_all_engines(
    grouped: list[Engine], tmp_path: Path, change: Callable[[onnx.NodeProto], None]
) -> None:
    folder = shutil.copytree(grouped[0].graph.parent, tmp_path / "target")
    as_of_tomorrow(folder / "onnxruntime.onnx", change)
    engine = open_engine("onnxruntime", folder / "model.onnx", grouped[0].contract)
    assert engine.graph.name == "model.onnx"
    tokens = torch.arange(5).expand(1, 5)
    found, expected = (called(one, [9], tokens, range(4), 1) for one in (engine, grouped[1]))
    for own, plain in zip(found, expected, strict=True):
        assert torch.equal(own, plain)


@pytest.mark.parametrize("change", TOMORROW)
def test_an_export_keeps_no_graph_that_the_library_here_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[onnx.NodeProto], None]
) -> None:
    def write(folder: Path) -> dict[str, int]:
        fired = write_fused(folder)
        as_of_tomorrow(folder / "onnxruntime.onnx", change)
        return fired

    monkeypatch.setattr(export_model, "write_fused", write)
    checkpoint = tiny_llama(tmp_path / "checkpoint", head_dim=32)
    report = export_bundle(checkpoint, tmp_path / "bundle")
    [note] = report.notes
    assert note.startswith(
        "target/onnxruntime.onnx was left out, and ONNX Runtime will run the slower model.onnx: ONNX"
    )
    assert not (tmp_path / "bundle" / "target" / "onnxruntime.onnx").exists()


def called(engine: Engine, starts: Sequence[int], tokens: Tensor, parents: Sequence[int], filled: int) -> list[Tensor]:
    """The logits of a call, and the caches after it, which held what `filled` draws."""
    depths, ancestors = [0], torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents, 1):
        depths.append(depths[parent] + 1)
        ancestors[node] |= ancestors[parent]
    inputs = {
        "input_ids": tokens,
        "start": torch.tensor(starts),
        "depths": torch.tensor([depths] * len(starts)),
        "ancestors": ancestors.repeat(len(starts), 1, 1),
    }
    draws = torch.Generator().manual_seed(filled)
    cache = blank_cache(engine.contract, len(starts), 96)
    for buffer in cache.values():
        buffer.copy_(torch.randn(1, *buffer.shape[1:], generator=draws))
    logits = torch.zeros(*tokens.shape, engine.contract.vocab_size)
    make_step(engine, cache, inputs, {"logits": logits}).run()
    return [logits, *cache.values()]


@pytest.mark.parametrize("width", [1, 5, 30])
@pytest.mark.parametrize("children", [1, 2])
def test_its_own_operators_compute_what_the_graph_of_all_engines_computes(
    grouped: list[Engine], width: int, children: int
):
    """Three rows of unlike lengths, the last up to the end of its cache, each with a line or a tree of tokens."""
    tokens = torch.randint(64, (3, width), generator=torch.Generator().manual_seed(width))
    parents = [(node - 1) // children for node in range(1, width)]
    ours, plain = (called(engine, [0, 9, 96 - width], tokens, parents, 1) for engine in grouped)
    for own, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(own, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("width", [2, 5, 33])
def test_its_own_operators_give_a_row_the_same_bits_beside_others_and_before_padding(grouped: list[Engine], width: int):
    engine, wide = grouped[0], 40
    tokens = torch.randint(64, (2, wide), generator=torch.Generator().manual_seed(width))
    together, *caches = called(engine, [30, 7], tokens, [*range(wide - 1)], 2)
    for row, start in enumerate([30, 7]):
        alone, *own = called(engine, [start], tokens[row : row + 1, :width], [*range(width - 1)], 2)
        assert torch.equal(alone[0], together[row, :width])
        for buffer, beside in zip(own, caches, strict=True):
            assert torch.equal(buffer[0, :, : start + width], beside[row, :, : start + width])
