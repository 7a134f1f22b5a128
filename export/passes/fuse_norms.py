"""Make one RMSNormalization node of each root-mean-square norm, by onnxscript's rule."""

import onnx_ir as ir
from onnxscript.rewriter.rules.fusion import _rms_normalization as rule


def fuse_norms(model: ir.Model) -> int:
    return int(rule.fuse_rms_normalization(model))
