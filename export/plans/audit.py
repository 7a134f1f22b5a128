"""Check what must hold of a parsed TensorRT network before it is compiled: its parser misreads without a word."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ...engines import SOURCE, SOURCES, Contract, ExportError, VisionContract


def audit(
    trt: Any, network: Any, contract: Contract, sizes: Mapping[str, int], spelled: int = 0, unfused: bool = False
) -> None:
    """Refuse a network that is not the graph of `contract` at these sizes.

    `spelled` attentions were written out; `unfused` allows the library to take the others apart.
    """
    _audit_interface(network, contract, sizes)
    attentions = list(layers(network, trt.LayerType.ATTENTION_INPUT, trt.IAttentionInputLayer))
    sources = bool(contract.of_kind(SOURCE))
    unmasked = contract.layers if sources and SOURCES not in contract.capabilities else 0  # all of a source is seen
    for layer in attentions:
        if layer.attention.mask is None and unmasked:
            unmasked -= 1
        else:
            _audit_attention(trt, layer, unfused)
    promised = contract.layers * (1 + sources)
    if contract.cache_names and len(attentions) + spelled < promised:
        raise ExportError(
            f"the network has {len(attentions)} attention layers and {spelled} written out, its contract promises "
            f"{promised}; please report it"
        )
    _audit_cache(trt, network, contract)


def audit_vision(trt: Any, network: Any, contract: VisionContract, sizes: Mapping[str, int]) -> None:
    """Refuse a network that is not the vision graph of `contract` at these sizes."""
    entries = network.get_output(0).shape[0]  # as many as the graph makes of such images
    _audit_interface(network, contract, {**sizes, "entries": entries})
    for layer in layers(network, trt.LayerType.ATTENTION_INPUT, trt.IAttentionInputLayer):
        _refuse_causal(trt, layer)


def layers(network: Any, kind: Any, typed: Any) -> Iterator[Any]:
    """Give the layers of a kind, each as the class it is."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == kind:
            layer.__class__ = typed  # the bindings give the base class only
            yield layer


def _audit_interface(network: Any, contract: Contract | VisionContract, sizes: Mapping[str, int]) -> None:
    given = {
        "input": [network.get_input(index) for index in range(network.num_inputs)],
        "output": [network.get_output(index) for index in range(network.num_outputs)],
    }
    for kind, specs in (("input", contract.inputs), ("output", contract.outputs)):
        found = {tensor.name: (_dtype(tensor), tuple(tensor.shape)) for tensor in given[kind]}
        expected = {
            spec.name: (
                spec.dtype,
                tuple(-1 if isinstance(size := sizes.get(str(dim), dim), str) else size for dim in spec.shape),
            )
            for spec in specs
        }
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise ExportError(
                    f"the network has the {kind} {name!r} as {found.get(name)}, its contract promises "
                    f"{expected.get(name)}; please report it"
                )


def _dtype(tensor: Any) -> str:
    names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}
    return names.get(name := str(tensor.dtype.name), name.lower())


def _audit_attention(trt: Any, layer: Any, unfused: bool) -> None:
    _refuse_causal(trt, layer)
    attention = layer.attention
    if attention.mask is None:
        raise ExportError(f"layer {layer.name}: its attention has no mask, expected one computed from start")
    if attention.decomposable and not unfused:
        raise ExportError(f"layer {layer.name}: its attention may be taken apart, expected a fused kernel")


def _refuse_causal(trt: Any, layer: Any) -> None:
    attention = layer.attention
    if attention.causal or attention.causal_kind != trt.CausalMaskKind.NONE:
        raise ExportError(
            f"layer {layer.name}: its attention is {attention.causal_kind.name}, which is right for the first call "
            "only; expected the mask that the graph computes from start"
        )


def _audit_cache(trt: Any, network: Any, contract: Contract) -> None:
    outputs = {network.get_output(index).name for index in range(network.num_outputs)}
    pasts = set(contract.aliases.values())
    readers: dict[str, list[str]] = defaultdict(list)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for place in range(layer.num_inputs):
            tensor = layer.get_input(place)
            if tensor is not None and tensor.name in pasts:
                readers[tensor.name].append(layer.name)
    updates = {}
    for layer in layers(network, trt.LayerType.KV_CACHE_UPDATE, trt.IKVCacheUpdateLayer):
        past, present = layer.get_input(0).name, layer.get_output(0).name
        if layer.cache_mode != trt.KVCacheMode.LINEAR:
            raise ExportError(f"layer {layer.name}: its cache mode is {layer.cache_mode.name}, expected LINEAR")
        if past not in pasts:
            raise ExportError(f"layer {layer.name}: it updates {past!r}, expected a cache input of the contract")
        if present not in outputs or contract.aliases.get(present) != past:
            raise ExportError(f"layer {layer.name}: it writes {present!r}, expected the output that aliases {past!r}")
        if readers[past] != [layer.name]:
            others = [name for name in readers[past] if name != layer.name]
            raise ExportError(f"layer {others[0]}: it reads {past!r}, which {layer.name} overwrites")
        updates[present] = past
    if missing := sorted(contract.aliases.keys() - updates.keys()):
        raise ExportError(f"no layer updates the cache output {missing[0]!r} in place; please report it")
