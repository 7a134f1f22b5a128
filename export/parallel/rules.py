"""How each operator passes on what is spread over shards: a rule for each, in one table."""

from ...engines.torch.onnx_graph import Node
from .alone import along_axis, each_alone, gather_elements, norm, reduce
from .heads import attention, rotary, scatter_entries
from .products import convolution, gather, gemm, matmul
from .repeated import expand
from .shapes import concat, reshape, slices, split, squeeze, transpose, unsqueeze
from .spread import Whole
from .walk import Outputs, Rule, Walk

EACH_ALONE = """
Abs Add And Cast Clip Cos Div Equal Exp Floor Gelu Greater GreaterOrEqual Less LessOrEqual Log Max Min Mul Neg Not Or
Pow Reciprocal Relu Round Sigmoid Sin Softplus Sqrt Sub Tanh Where
"""


FOLLOWS_FOLDS = {"LayerNormalization", "RMSNormalization", "ReduceMax", "ReduceMean", "ReduceSum", "Reshape"}


def in_one_block(rule: Rule) -> Rule:
    """Refuse what is folded with other axes, where a rule reads the places of an axis."""

    def checked(walk: Walk, node: Node) -> Outputs:
        if any((spread := walk.spread(name)) and spread.blocks > 1 for name in node.inputs):
            raise Whole(walk.seeds(node), f"{node.op} reads what is folded")
        return rule(walk, node)

    return checked


RULES: dict[str, Rule] = {
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
RULES = {op: rule if op in FOLLOWS_FOLDS else in_one_block(rule) for op, rule in RULES.items()}
RULES |= dict.fromkeys(EACH_ALONE.split(), each_alone)
