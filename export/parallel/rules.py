"""How each operator passes on what is spread over shards: a rule for each, in one table."""

from .alone import along_axis, each_alone, gather_elements, norm, reduce
from .heads import attention, rotary, scatter_entries
from .products import convolution, gather, gemm, matmul
from .shapes import concat, expand, reshape, slices, split, squeeze, transpose, unsqueeze
from .walk import Rule

EACH_ALONE = """
Abs Add And Cast Clip Cos Div Equal Exp Floor Gelu Greater GreaterOrEqual Less LessOrEqual Log Max Min Mul Neg Not Or
Pow Reciprocal Relu Round Sigmoid Sin Softplus Sqrt Sub Tanh Where
"""
RULES: dict[str, Rule] = {
    **dict.fromkeys(EACH_ALONE.split(), each_alone),
    "Attention": attention,
    "Concat": concat,
    "Conv": convolution,
    "Expand": expand,
    "Gather": gather,
    "GatherElements": gather_elements,
    "Gemm": gemm,
    "LayerNormalization": norm,
    "MatMul": matmul,
    "RMSNormalization": norm,
    "ReduceMax": reduce,
    "ReduceMean": reduce,
    "ReduceSum": reduce,
    "Reshape": reshape,
    "RotaryEmbedding": rotary,
    "Slice": slices,
    "Softmax": along_axis,
    "Split": split,
    "Squeeze": squeeze,
    "TensorScatter": scatter_entries,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
}
