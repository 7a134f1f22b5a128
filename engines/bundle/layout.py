"""The names of the files and models in a bundle."""

from pathlib import Path

MANIFEST = "manifest.json"
NGRAMS = "ngram"  # the folder of a table of n-grams, if one was counted
PLANS, COSTS = "plans", "costs"  # made from a bundle on some machine; its manifest does not vouch for them
TOKENIZER = "tokenizer.json"  # the target's, and in its folder that of a draft with tokens of its own
GRAPH, WEIGHTS = "model.onnx", "weights.bin"  # each model has both, in a folder of its own
FUSED = "onnxruntime.onnx"  # the same over the same weights, if ONNX Runtime has operators of its own for it
ADAPTED = "adapters."  # begins the names of the same two with room for adapters, over the same weights
TABLES = "tables.npz"  # of a model that a round reads more of than its graph, beside them

TARGET, DRAFT, HEAD, FOREIGN = "target", "draft", "head", "foreign"
KINDS = (TARGET, DRAFT, HEAD, FOREIGN)  # the purposes of a bundle's models
DRAFTS = (DRAFT, "draft2", "draft3", "draft4")  # the names under which export writes its drafts
VISION = "vision"  # that of the graph that sees for the target, and its folder
ENCODER = "encoder"  # the name of the target's encoder; that of a draft that has its own begins with the draft's


def shard_folder(folder: Path, rank: int) -> Path:
    """Return where a shard of a model lies, whose first one is in the model's own folder."""
    return folder / f"shard{rank}" if rank else folder
