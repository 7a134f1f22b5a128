"""Opens sessions of ONNX Runtime, and names the nodes that it would compute on another device than asked."""

from pathlib import Path
from typing import Any

import torch

from ..errors import EngineError, first_line
from .threads import Threads

GPU = "CUDAExecutionProvider"
# What it raises for forms of operators that it does not know, and says of operators.
NOT_KNOWN, NOT_REGISTERED = ("InvalidGraph", "NotImplemented"), "is not a registered function/op"


class UnknownOperators(EngineError):
    """The ONNX Runtime that is installed does not know operators of a graph."""


def open_session(graph: Path, threads: Threads, exact_weights: bool = False, device: str = "cpu") -> Any:
    extra = "cpu" if device == "cpu" else "cuda"
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError(
            f"engine onnxruntime needs the onnxruntime package; pip install 'trt-spec[{extra}]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads.count
    # It plans for each set of shapes, which change as the cache grows: no faster here, and each plan keeps memory.
    options.enable_mem_pattern = False
    if not threads.stay_awake:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if device == "cpu":  # shares of attention that are nearly nothing took a third of a step over 1,900 tokens
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
    # The engine fuses quantised matrices into MatMulNBits, which computes in int8 (4) or in the input's type (0).
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0" if exact_weights else "4")
    options.log_severity_level = 3
    if device == "cpu":
        return _open(graph, options, "CPUExecutionProvider", {})
    if GPU not in onnxruntime.get_available_providers():
        raise EngineError("the onnxruntime package here has no CUDA; pip install 'trt-spec[cuda]' instead of [cpu]")
    settings = {
        "device_id": str(torch.device(device).index or 0),
        "user_compute_stream": str(torch.cuda.current_stream(device).cuda_stream),
        "use_tf32": "0",
    }
    try:
        # With CUDA graphs it refuses a graph if anything but shapes would be computed on the CPU.
        return _open(graph, options, GPU, settings | {"enable_cuda_graph": "1"})
    except EngineError as error:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        try:
            elsewhere = nodes_elsewhere(_open(graph, options, GPU, settings), GPU)
        except EngineError:
            raise error from None  # the graph cannot be opened even without CUDA graphs
        raise EngineError(f"{error}; nodes not on the GPU: {', '.join(elsewhere) or 'none'}") from error


def _open(graph: Path, options: Any, provider: str, settings: dict[str, str]) -> Any:
    import onnxruntime

    flushes = flushes_denormals()
    try:
        session = onnxruntime.InferenceSession(str(graph), options, providers=[(provider, settings)], enable_fallback=0)
    except Exception as error:  # the bindings raise a dozen unrelated types
        unknown = type(error).__name__ in NOT_KNOWN or NOT_REGISTERED in str(error)
        kind = UnknownOperators if unknown else EngineError
        raise kind(f"ONNX Runtime cannot open {graph}: {first_line(error)}") from error
    finally:
        torch.set_flush_denormal(flushes)  # the first session that is opened leaves the thread otherwise
    if provider not in session.get_providers():
        raise EngineError(f"ONNX Runtime cannot load {provider}; see its warnings for the missing library")
    return session


def flushes_denormals() -> bool:
    """Whether this thread takes denormal numbers for nothing, as its program may have chosen."""
    return not (torch.tensor(5e-324, dtype=torch.float64) * 1.0).item()


def nodes_elsewhere(session: Any, provider: str) -> list[str]:
    """List operator and name of each node that another provider computes, except shapes, which belong on the CPU."""
    return [
        f"{node.op_type} {node.name!r}"
        for subgraph in session.get_provider_graph_assignment_info()
        if subgraph.ep_name != provider
        for node in subgraph.get_nodes()
        if node.op_type != "Shape"
    ]
