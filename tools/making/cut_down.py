"""Cut a model down to a few of its layers: a draft that begins with much of what its target knows."""

from copy import deepcopy
from typing import Any

from torch.nn import ModuleList

from ...engines import RequestError


def cut_down(model: Any, layers: int) -> Any:
    """Return a copy with so many of its layers: the first, the last, and others evenly between them.

    Its embedding and its vocabulary projection are the model's own, and training leaves them as they are.
    """
    count = model.config.num_hidden_layers
    stacks = [name for name, one in model.named_modules() if isinstance(one, ModuleList) and len(one) == count]
    if not stacks:
        raise RequestError(f"--cut needs layers in a list, which a {model.config.model_type} has not; leave it out")
    if not 1 <= layers < count:
        raise RequestError(f"--cut is {layers}, expected 1 to {count - 1}: the target has {count} layers")
    parent, _, name = stacks[0].rpartition(".")
    kept = evenly(layers, count)
    cut = deepcopy(
        model, {id(one): None for index, one in enumerate(model.get_submodule(stacks[0])) if index not in kept}
    )
    stack = ModuleList(one for one in getattr(cut.get_submodule(parent), name) if one is not None)
    setattr(cut.get_submodule(parent), name, stack)
    for index, layer in enumerate(stack):
        parts: list[Any] = [*layer.modules()]
        for part in parts:
            if hasattr(part, "layer_idx"):
                part.layer_idx = index
    cut.config.num_hidden_layers = layers
    if kinds := getattr(cut.config, "layer_types", None):
        cut.config.layer_types = [kinds[index] for index in kept]
    for matrix in (cut.get_input_embeddings(), cut.get_output_embeddings()):
        matrix.weight.requires_grad_(False)
    return cut


def evenly(wanted: int, count: int) -> list[int]:
    """Return so many of the indices below `count`, the first and the last among them."""
    return [round(index * (count - 1) / max(1, wanted - 1)) for index in range(wanted)]
