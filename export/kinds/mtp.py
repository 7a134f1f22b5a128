"""MTP: one layer of the target's kind that reads an embedding beside the target's last hidden state.

speculators      tensors `mtp_layers.0.…`; the fields of the layer lie in `transformer_layer_config`
Qwen             tensors `mtp.…`; the fields are the model's own
in a target      tensors `model.layers.N.…` after its N layers, or Qwen's, which transformers reads
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import modeling_layers
from transformers.modeling_layers import MtpLayer, MtpModel

from ...engines import ExportError
from ...engines.errors import first_line, one_line
from ..checkpoints.weight_files import weight_files
from ..families.text_models import OTHERS
from ..quantised import Dequantised, how_quantised
from ..tracing.hidden_states import LAST, Features, Last
from ..tracing.swapping import swapped
from .files import filled, shapes_of
from .heads import HeadCheckpoint, HeadKind, Wire
from .layers import LAYER_FIELDS, LAYERS, MEANINGLESS, LayerClasses, layer_config
from .slots import SlotHead, ends_of

OWN_FIELDS = {
    "draft_vocab_size", "num_nextn_predict_layers", "speculators_config", "speculators_model_type",
    "speculators_version", "transformer_layer_config",
}  # fmt: skip
PREFIX = re.compile(r"(model\.)?(mtp_layers\.0|mtp\.layers\.0|mtp)\.")
NAMES = {  # of ours, by those that others have
    "enorm": ("token_layernorm", "pre_fc_norm_embedding"),
    "hnorm": ("hidden_layernorm", "pre_fc_norm_hidden"),
    "eh_proj": ("input_proj", "fc"),
    "post_norm": ("final_layernorm", "norm"),
}
UNREAD = ("t2d", "d2t", "embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")  # they are the target's
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
UNSAID = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}  # what transformers does not know of Qwen's
PLAIN, NORMED = "reads its own states before its norm", "reads its own states after its norm"


class Mtp(SlotHead):
    """One such layer, which proposes every token of a round: after the first it reads its own hidden states."""

    reads_embeddings = True

    def __init__(self, config: Any, classes: LayerClasses) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = MtpLayer(config, classes.layer, classes.norm, 0)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary_emb = classes.rotary(config)
        self.norm_output = True  # its own hidden state is read as its norm gives it, not as its layer does

    def _run(
        self, input_ids: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layer
        read = torch.cat([layer.enorm(self.embed_tokens(input_ids)), layer.hnorm(features)], -1)
        hidden = layer.mtp_block(
            layer.eh_proj(read),
            attention_mask=mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(features, position_ids),
            cache=cache,
        )
        normed = layer.post_norm(hidden)
        return (normed if self.norm_output else hidden), normed

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # its layer may have experts, as its target's have


class MtpKind(HeadKind):
    """A layer in a checkpoint of its own."""

    name = "mtp"
    known: ClassVar[Mapping[str, set[str]]] = {
        "": LAYER_FIELDS | OWN_FIELDS | MEANINGLESS,
        "transformer_layer_config": LAYER_FIELDS | MEANINGLESS,
    }

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        if fields.get("speculators_model_type") == "mtp":
            return True
        return bool(shapes) and all(PREFIX.match(key) or key in UNREAD for key in shapes)

    def read(self, checkpoint: HeadCheckpoint, target: Any, dtype: str, tokens: int) -> tuple[Mtp, dict[str, Wire]]:
        config, classes, tensors = self._read(checkpoint, target)
        if config.hidden_size != target.config.hidden_size:
            raise ExportError(
                f"head {checkpoint.name} reads {config.hidden_size} numbers of each token of its target, whose hidden "
                f"states have {target.config.hidden_size}; take the head of this target"
            )
        with torch.device("meta"):
            head: Mtp = Mtp(config, classes)
        filled(head, {f"layer.{key}": one for key, one in tensors.items()} | ends_of(target), checkpoint.name, dtype)
        head.rotary_emb = classes.rotary(config)
        ways = {NORMED: True, PLAIN: False}  # of which readers take one or the other
        if "speculators_model_type" in checkpoint.fields:  # as it was trained
            ways = {NORMED: True}
        return head, {way: partial(_wire, head, normed) for way, normed in ways.items()}

    def _read(self, checkpoint: HeadCheckpoint, target: Any) -> tuple[Any, LayerClasses, dict[str, Tensor]]:
        name, fields = checkpoint.name, checkpoint.fields
        _refuse_several(name, fields.get("num_nextn_predict_layers", 1))
        alone = {"num_hidden_layers": 1, "layer_types": None}
        inner = fields.get("transformer_layer_config") or fields
        config = layer_config(name, dict(inner) | alone, target.config.vocab_size)
        tensors = {_renamed(key): value for key, value in checkpoint.tensors().items() if key not in UNREAD}
        return config, LAYERS[config.model_type], tensors


def _wire(head: Mtp, normed: bool) -> Features:
    head.norm_output = normed
    return Features(Last(), (LAST,))


class MtpOfTarget(MtpKind):
    """The layer that a target's own checkpoint has after those of the target."""

    known: ClassVar[Mapping[str, set[str]]] = {}  # the fields are the target's

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return _count(fields, shapes) > 0

    def _read(self, checkpoint: HeadCheckpoint, target: Any) -> tuple[Any, LayerClasses, dict[str, Tensor]]:
        name = checkpoint.name
        _refuse_several(name, _count(checkpoint.fields, shapes_of(name, checkpoint.path)))
        if _of_text(checkpoint.fields).get("mtp_use_dedicated_embeddings"):
            raise ExportError(
                f"the layer of MTP in {name} has an embedding of its own, expected one that reads the target's"
            )
        settings = how_quantised(name, checkpoint.fields)
        made = None if settings is None else Dequantised(name, weight_files(name, checkpoint.path), settings)
        unsaid = {} if hasattr(target.config, "num_mtp_layers") else UNSAID
        try:
            with swapped(target.config, **unsaid):
                config = target.config.get_mtp_config()
                found: Any = _from_checkpoint_of(target, made)
        except Exception as error:  # transformers and safetensors each have their own
            if made is not None and made.failure is not None:
                raise made.failure from error
            raise ExportError(f"the layer of MTP in {name} cannot be read: {one_line(first_line(error))}") from error
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or not found.use_post_norm or found.rotary_emb is None:
            raise ExportError(f"the layer of MTP in {name} is of another kind than this version can run")
        config._attn_implementation = "eager"
        layer = found.layers[0]
        norm = type(target.get_decoder().norm)  # transformers takes one of the last layer, which may be recurrent
        classes = LayerClasses(type(layer.mtp_block), norm, type(found.rotary_emb))
        return config, classes, dict(layer.state_dict())


def _from_checkpoint_of(target: Any, made: Dequantised | None) -> MtpModel:
    """Let transformers read the layer, of a quantised checkpoint what is made of it.

    It knows by number the layers of published sizes alone, and takes nothing but files.
    """
    known = target._keys_to_ignore_on_load_unexpected or []
    own = [*(one for one in known if not OTHERS.search(one)), rf"(^|\.)layers\.{target.config.num_hidden_layers}\."]
    with ExitStack() as patches:
        patches.enter_context(swapped(target, _keys_to_ignore_on_load_unexpected=own))
        if made is not None:
            opened = swapped(
                modeling_layers,
                _get_resolved_checkpoint_files=lambda **_: ([""], None),
                safe_open=lambda *_, **__: _Opened(made),
            )
            patches.enter_context(opened)
        return MtpModel.from_pretrained(target)


class _Opened:
    """Tensors that are made when they are asked for, as a file that transformers has opened."""

    def __init__(self, made: Dequantised) -> None:
        self.keys, self.get_slice = made.keys, made.__getitem__

    def __exit__(self, *_: object) -> None:
        pass


def _of_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a model, those of its text model among them if it reads more."""
    text = fields.get("text_config")
    return {**fields, **text} if isinstance(text, dict) else fields


def _count(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many such layers a checkpoint says that it has; Qwen3-Next has them and does not say so."""
    text = _of_text(fields)
    said = next((text[name] for name in COUNTS if text.get(name)), None)
    stored = {key.split(".")[2] for key in shapes if key.startswith("mtp.layers.")}
    return said if isinstance(said, int) else len(stored)


def _refuse_several(name: str, count: Any) -> None:
    if count != 1:
        raise ExportError(f"{name} has {count} layers of MTP, one after the other; this version runs a single one")


def _renamed(key: str) -> str:
    inner, _, rest = PREFIX.sub("", key).partition(".")
    own = next((own for own, theirs in NAMES.items() if inner in theirs), None)
    return f"{own}.{rest}" if own else f"mtp_block.{inner}.{rest}"


def lives_in(name: str | Path, target: str | Path | None) -> bool:
    """Say whether a draft is named as its target is."""
    if target is None:
        return False
    return str(name) == str(target) or (Path(name).exists() and Path(name).resolve() == Path(target).resolve())
