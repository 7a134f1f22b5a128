"""Runs what TensorRT gets in ONNX Runtime."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime


def run(model: ir.Model, feeds: dict[str, np.ndarray], folder: Path) -> list[np.ndarray]:
    """All outputs in ONNX Runtime; the weights lie in `folder`."""
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    # Accuracy as of the integers: the float32 product of what they stand for.
    settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), settings)
    return list(session.run(None, feeds))
