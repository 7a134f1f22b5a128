"""Read a model's shape from its configuration, and refuse by name what cannot be exported."""

from dataclasses import dataclass
from typing import Any

from ...engines import (
    RECURRENT,
    SOURCES,
    TAILS,
    Contract,
    ExportError,
    Sound,
    State,
    keys_and_values,
    source_states,
)
from ..tracing.recurrent_layers import Layer, layers_in
from .table import RECURRENT_FAMILIES, REFUSED, WITH_SOURCES, WORKS
from .text_models import READS_MORE

STATIC_ROTARY = (
    "default",
    "linear",
    "llama3",
    "yarn",
    "proportional",
)  # frequencies that do not depend on the sequence's length
MOVING_ROTARY = ("dynamic", "longrope")  # frequencies that do not up to some length
# Layers whose only state is rows of keys and values.
STATIC_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


ENDLESS = 2048  # positions that are allowed where a model has no last one
WEIGHTLESS = 2**18  # those where, besides, no token takes memory
POSITIONS = {"bloom": "seq_length", "mpt": "max_seq_len"}  # where their number has another name


@dataclass(frozen=True)
class SourceShape:
    """The sources of a decoder: tokens, or sound of one length."""

    longest: int  # entries that an encoder makes of one
    sound: Sound | None = None


@dataclass(frozen=True)
class ModelShape:
    """The facts about a model that the contract needs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    positions: int
    window: int | None  # the widest sliding window of a layer
    value_dim: int | None = None  # if values are of another size than keys
    recurrent: tuple[Layer, ...] = ()  # layers with states that absorb tokens
    attends: tuple[int, ...] = ()  # where some are, which layers have keys and values
    source: SourceShape | None = None  # of a decoder that has an encoder
    own: tuple[tuple[int, int], ...] = ()  # where layers differ: the key heads and their size, of each that keeps keys
    ends: str = ""  # why it has no more positions, if its configuration names more

    def contract(self, max_length: int, dtype: str) -> Contract:
        if self.own:
            states = tuple(
                State(f"{name}_{layer}", sizes, dtype)
                for layer, sizes in enumerate(self.own)
                for name in ("key", "value")
            )
            return Contract(len(self.own), self.heads, states, self.vocab_size, max_length, dtype, (TAILS,))
        states = keys_and_values(self.layers, self.kv_heads, self.head_dim, dtype, self.value_dim) if self.heads else ()
        if self.source is not None:
            states += source_states(self.layers, self.heads, self.head_dim, dtype)
            can = (TAILS,) if self.source.sound else (TAILS, SOURCES)
            return Contract(self.layers, self.heads, states, self.vocab_size, max_length, dtype, can)
        if not self.recurrent:
            return Contract(self.layers, self.heads, states, self.vocab_size, max_length, dtype, (TAILS,))
        by_layer = {layer.number: layer.states(dtype) for layer in self.recurrent}
        kept = [
            state
            for layer in range(self.layers)
            for state in (
                *(states[2 * layer : 2 * layer + 2] if layer in self.attends else ()),
                *by_layer.get(layer, ()),
            )
        ]
        count = len(self.attends)
        return Contract(count, self.heads, tuple(kept), self.vocab_size, max_length, dtype, (RECURRENT,))


def refuse_unsupported(name: str, fields: dict[str, Any]) -> None:
    """Refuse by what `config.json` itself says, before any code of the architecture is imported."""
    kind = fields.get("model_type")
    architectures = fields.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "no architecture"
    if kind is None:
        raise ExportError(
            f"checkpoint {name} says no model_type in its config.json; a head is exported beside its target, by --draft"
        )
    if fields.get("auto_map") and kind not in WORKS:  # the type that transformers knows by itself is enough
        raise ExportError(f"checkpoint {name} ({kind}) needs its own Python code (auto_map), which is never run")
    if fields.get("is_encoder_decoder") and kind in WORKS and kind not in WITH_SOURCES:
        raise ExportError(f"checkpoint {name} ({kind}) says that it is an encoder-decoder, which its type never is")
    if kind not in WORKS and kind not in READS_MORE:
        reason = REFUSED.get(str(kind), "this version does not know it")
        raise ExportError(
            f"checkpoint {name} has the model type {kind!r}, which cannot be exported: {reason}; "
            "trt-spec families lists what can"
        )
    heads = ["ForCausalLM", "LMHeadModel", *(["ForConditionalGeneration"] if kind in READS_MORE else ())]
    expected = "a causal LM"
    if kind in WITH_SOURCES:
        heads = ["ForConditionalGeneration", "MTModel", "T5WithLMHeadModel"]
        expected = "an encoder-decoder"
    if not architecture.endswith(tuple(heads)):
        raise ExportError(f"checkpoint {name} holds {architecture}, expected {expected} with a vocabulary head")


def shape_of(name: str, config: Any) -> ModelShape:
    """Read the shape of a supported configuration; what would make cached rows wrong is refused by name."""
    if config.model_type in WITH_SOURCES:
        return _shape_with_source(config)
    refuse_moving_positions(name, config, MOVING_ROTARY)
    if getattr(config, "add_cross_attention", False):
        raise ExportError(f"checkpoint {name} attends to an encoder (add_cross_attention), expected a decoder alone")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # of images alone
        raise ExportError(f"checkpoint {name} attends in both directions, expected causal attention")
    if config.model_type == "doge" and config.is_moe:
        raise ExportError(f"checkpoint {name} has experts that are code of its own (is_moe), expected a Doge without")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    recurrent, attends = layers_in(config) if config.model_type in RECURRENT_FAMILIES else ((), ())
    if recurrent and not attends:
        return _shape_without_attention(config, recurrent)
    for layer_type in sorted(layer_types.difference(STATIC_LAYERS)) if not recurrent else ():
        raise ExportError(
            f"checkpoint {name} has layers of the type {layer_type}, which keep another state than keys and values; "
            f"supported are {', '.join(STATIC_LAYERS)}"
        )
    positions = getattr(config, POSITIONS.get(config.model_type, "max_position_embeddings"), None)
    if config.model_type == "bloom" and positions is None:
        positions = ENDLESS
    if type(positions) is not int or positions < 1:
        raise ExportError(f"checkpoint {name} has max_position_embeddings {positions!r}, expected a positive number")
    own = _sizes_of_each(config)
    steady = min(_steady(rotary, positions) for rotary in _rotaries(config))
    ends = f"a text of more than {steady:,} tokens turns its keys by other factors" if steady < positions else ""
    kept = getattr(config, "keep_window_size", steady)  # of Doge
    if kept < steady:
        steady, ends = kept, f"of a text of more than {kept:,} tokens its layers see a choice alone"
    heads = config.num_attention_heads
    rank = getattr(config, "kv_lora_rank", None)  # of latents, which are kept beside one rotary key of all heads
    return ModelShape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=1 if rank else own[0][0] if own else kv_heads_of(config),
        head_dim=rank or (own[0][1] if own else getattr(config, "head_dim", None) or config.hidden_size // heads),
        value_dim=config.qk_rope_head_dim if rank else None,
        vocab_size=config.vocab_size,
        positions=steady,
        window=_window(config, layer_types),
        recurrent=recurrent,
        attends=attends,
        own=own,
        ends=ends,
    )


def _shape_without_attention(config: Any, recurrent: tuple[Layer, ...]) -> ModelShape:
    """Read the shape of a model all of whose layers are recurrent."""
    return ModelShape(
        layers=config.num_hidden_layers,
        heads=0,
        kv_heads=0,
        head_dim=0,
        vocab_size=config.vocab_size,
        positions=getattr(config, "max_position_embeddings", None) or WEIGHTLESS,
        window=None,
        recurrent=recurrent,
    )


def _shape_with_source(config: Any) -> ModelShape:
    """Read the shape of a decoder that has an encoder."""
    heads = getattr(config, "decoder_attention_heads", None) or config.num_heads
    head_dim = getattr(config, "d_kv", None) or config.d_model // heads
    positions = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    positions = positions or ENDLESS
    source = SourceShape(positions)
    if bands := getattr(config, "num_mel_bins", None):
        entries = config.max_source_positions
        source = SourceShape(entries, Sound(bands, 2 * entries))  # two frames become an entry
    return ModelShape(
        layers=getattr(config, "decoder_layers", None) or config.num_decoder_layers,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        positions=positions,
        window=None,
        source=source,
    )


def _sizes_of_each(config: Any) -> tuple[tuple[int, int], ...]:
    """Return the key heads and their size of each layer that keeps keys, if not all keep the same (Gemma 3n, 4)."""
    shared = getattr(config, "num_kv_shared_layers", 0)  # those ask the keys of the last one of their type
    kept = config.num_hidden_layers - shared
    if not getattr(config, "is_heterogeneous", False):
        return ((kv_heads_of(config), config.head_dim),) * kept if kept < config.num_hidden_layers else ()
    layers = [config.per_layer_config[layer] for layer in range(kept)]
    return tuple((layer.num_key_value_heads, layer.head_dim) for layer in layers)


def kv_heads_of(config: Any) -> int:
    """Return how many heads have keys and values of their own."""
    heads: int = config.num_attention_heads
    if getattr(config, "new_decoder_architecture", False):  # of Falcon
        return int(config.num_kv_heads)
    if hasattr(config, "multi_query"):
        return 1 if config.multi_query else heads
    return getattr(config, "num_key_value_heads", None) or heads


def _window(config: Any, layer_types: set[str]) -> int | None:
    """Give the window of the layers that slide, or of all layers where a configuration does not tell them apart."""
    slides = "sliding_attention" in layer_types or getattr(config, "layer_types", None) is None
    window = getattr(config, "sliding_window", None) if slides else None
    if "chunked_attention" in layer_types:  # within which tokens see each other, and no others
        return int(config.attention_chunk_size)
    if "local" in getattr(config, "attention_layers", ()):  # of GPT-Neo
        window = config.window_size
    return window if getattr(config, "use_sliding_window", True) else None


def refuse_moving_positions(name: str, config: Any, more: tuple[str, ...] = ()) -> None:
    """Keys are cached as rotated when they were written: a rotation that changes later would make them wrong."""
    for rotary in _rotaries(config):
        kind = rotary.get("rope_type", "default")
        if kind not in (*STATIC_ROTARY, *more):
            raise ExportError(
                f"checkpoint {name} has the rotary scaling {kind!r}, which may change with the sequence's length and "
                f"make cached keys wrong after a rollback; supported are {', '.join((*STATIC_ROTARY, *more))}"
            )


def _rotaries(config: Any) -> list[dict[str, Any]]:
    """Give the rotary settings of a model, or those of each type of its layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def _steady(rotary: dict[str, Any], positions: int) -> int:
    """Return up to which length keys stay as they were rotated; dynamic scaling begins after the last position."""
    long, short = ([rotary.get(f"{length}_{name}") for name in ("factor", "mscale")] for length in ("long", "short"))
    return min(positions, int(rotary["original_max_position_embeddings"])) if long != short else positions
