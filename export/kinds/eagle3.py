"""EAGLE-3: a layer or a few that read an embedding beside features which its encoder makes of several hidden states.

original and SpecForge   tensors `midlayer.…`; the fields of its one layer lie in config.json itself
speculators              tensors `layers.0.…`; the fields lie in `transformer_layer_config`

What their configurations leave open is decided by measurement. P-EAGLE says all tokens of a round in one pass, from
masks: `mask_hidden` stands for their features.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...engines import ExportError
from ..checking.oracle import computing_in_float32
from ..tracing.hidden_states import LAST, Features
from ..tracing.repeating import depth_of
from .files import filled
from .heads import HeadCheckpoint, HeadKind, Wire
from .layers import LAYER_FIELDS, LAYERS, MEANINGLESS, layer_config
from .slots import SlotHead, draft_vocabulary, mask_token_of

OLDER_THETA = 10000.0  # of rotary positions, where readers of a head have not found what it says
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OWN_FIELDS = {
    "draft_vocab_size", "eagle_config", LAYER_IDS, "embed_requires_grad", "fc_norm", "norm_before_fc",
    "mask_token_id", "norm_before_residual", "norm_output", "speculators_config", "speculators_model_type",
    "speculators_version", "target_hidden_size", "transformer_layer_config", "use_aux_hidden_state",
}  # fmt: skip
EAGLE_FIELDS = {LAYER_IDS, "use_aux_hidden_state", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
OURS = ("fc.", "fc_norm.", "input_norm.")  # tensors of the encoder
UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class Wiring:
    """How a head is joined to its target. Published configurations leave part of it open."""

    layers: tuple[int, ...]  # of which hidden states it reads: 0 is the embedding's, LAST the last one, normed
    norm_before_residual: bool = False  # the residual of its first layer is normed
    norm_output: bool = False  # its own hidden state is fed back as its last norm gives it, not as its last layer does
    theta: float | None = None  # of its rotary positions; None: as its configuration says


@dataclass(frozen=True)
class Parts:
    """The parts of a head beside its layers."""

    target_hidden: int  # width of the target's hidden states
    inputs: int  # how many of them it reads
    draft_vocab: int  # tokens that it may propose
    fc: bool = True  # without, the hidden states are its features
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm of all that it reads
    fc_norm: bool = False  # one norm of each
    mask_token: int | None = None  # that it reads in place of one not known yet (P-EAGLE)


class Encoder(nn.Module):
    """Makes a token's features of the target's hidden states; it is computed in the target's graph."""

    def __init__(self, parts: Parts, config: Any, norm: Any) -> None:
        super().__init__()
        width, each = parts.inputs * parts.target_hidden, parts.target_hidden
        if parts.norm_before_fc:
            self.input_norm = norm(width, eps=config.rms_norm_eps)
        if parts.fc_norm:
            self.fc_norm = nn.ModuleList(norm(each, eps=config.rms_norm_eps) for _ in range(parts.inputs))
        if parts.fc:
            self.fc = nn.Linear(width, config.hidden_size, bias=parts.fc_bias)

    def forward(self, hidden: Sequence[Tensor]) -> Tensor:
        """Encode hidden states [B, S, target_hidden] as features [B, S, hidden]."""
        if hasattr(self, "fc_norm"):
            hidden = [norm(one) for norm, one in zip(self.fc_norm, hidden, strict=True)]
        joined = torch.cat(list(hidden), -1)
        if hasattr(self, "input_norm"):
            joined = self.input_norm(joined)
        return self.fc(joined) if hasattr(self, "fc") else joined


class Eagle3(SlotHead):
    reads_embeddings = True

    def __init__(self, config: Any, parts: Parts, wiring: Wiring) -> None:
        super().__init__(config)
        self.parts, self.wiring, self.mask_token = parts, wiring, parts.mask_token
        classes = LAYERS[config.model_type]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(classes.layer(config, place) for place in range(config.num_hidden_layers))
        first = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):  # they read an embedding beside a hidden state
            old = getattr(first.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, old.out_features, bias=old.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = classes.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = classes.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, parts.draft_vocab, bias=False)
        self.rotary_emb = classes.rotary(config)
        self.encoder = Encoder(parts, config, classes.norm)
        self.knows(config.vocab_size, parts.draft_vocab)
        if parts.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, parts.inputs * parts.target_hidden))
            # What is read in place of features that there are none of: the encoder's of `mask_hidden`.
            self.register_buffer("mask_features", torch.zeros(1, 1, config.hidden_size), persistent=False)

    def _run(
        self, input_ids: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        if self.mask_token is not None:
            features = torch.where((input_ids == self.mask_token)[..., None], self.mask_features, features)
        rotary = self.rotary_emb(features, position_ids)
        hidden = features
        for place, layer in enumerate(list[Any](self.layers)):
            residual = hidden
            if place:
                read = layer.input_layernorm(hidden)
            else:
                normed = layer.hidden_norm(hidden)
                if self.wiring.norm_before_residual:
                    residual = normed
                read = torch.cat([layer.input_layernorm(self.embed_tokens(input_ids)), normed], -1)
            hidden = residual + layer.self_attn(read, rotary, mask, cache)[0]
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = self.norm(hidden)
        return (normed if self.wiring.norm_output else hidden), normed


class Eagle3Kind(HeadKind):
    name = "eagle3"
    known: ClassVar[Mapping[str, set[str]]] = {
        "": LAYER_FIELDS | OWN_FIELDS | MEANINGLESS,
        "transformer_layer_config": LAYER_FIELDS | MEANINGLESS,
        "eagle_config": EAGLE_FIELDS,
    }

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        named = str([fields.get("speculators_model_type"), fields.get("architectures")]).lower().replace("-", "")
        if "eagle3" in named:
            return True
        first = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
        return bool(first & set(shapes)) or (not shapes and "draft_vocab_size" in fields)

    def read(self, checkpoint: HeadCheckpoint, target: Any, dtype: str, tokens: int) -> tuple[Eagle3, dict[str, Wire]]:
        name, fields = checkpoint.name, checkpoint.fields
        said = {**fields, **(fields.get("eagle_config") or {})}
        flags = {key: value for key, value in said.items() if value is not None}
        tensors = {_renamed(key): value for key, value in checkpoint.tensors().items()}
        vocab = target.config.vocab_size
        for key in ("t2d", "embed_tokens.weight"):
            vocab = tensors[key].shape[0] if key in tensors else vocab
        config = layer_config(name, fields.get("transformer_layer_config") or fields, vocab)
        mask = self.mask_token(name, flags, vocab)
        parts = _parts(name, flags, tensors, config, target.config.hidden_size, mask)
        if vocab < tokens:
            raise ExportError(
                f"head {name} is for a target of {vocab:,} tokens, this one has {tokens:,}; take the head of this "
                "target"
            )
        with torch.device("meta"):
            head = Eagle3(config, parts, Wiring(()))
        _fill(head, name, tensors, target, dtype)
        ways = _wirings(name, flags, head, depth_of(target))
        return head, {in_words(way): partial(_wire, head, way) for way in ways}

    def mask_token(self, name: str, flags: Mapping[str, Any], vocab: int) -> int | None:
        return None


class PEagleKind(Eagle3Kind):
    name = "peagle"

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return fields.get("speculators_model_type") == "peagle" or "mask_hidden" in shapes

    def mask_token(self, name: str, flags: Mapping[str, Any], vocab: int) -> int | None:
        return mask_token_of(name, flags, vocab)


def _renamed(key: str) -> str:
    key = key.removeprefix("model.").replace("midlayer.", "layers.0.")
    return f"encoder.{key}" if key.startswith(OURS) else key


def _parts(
    name: str, flags: Mapping[str, Any], tensors: Mapping[str, Tensor], config: Any, hidden: int, mask: int | None
) -> Parts:
    fc = tensors.get("encoder.fc.weight")
    read = hidden if fc is None else fc.shape[1]
    if read % hidden or (fc is None and hidden != config.hidden_size):
        raise ExportError(
            f"head {name} reads {read} numbers of each token of its target, whose hidden states have {hidden}; take "
            "the head of this target"
        )
    return Parts(
        target_hidden=hidden,
        inputs=read // hidden,
        draft_vocab=tensors["d2t"].shape[0] if "d2t" in tensors else config.vocab_size,
        fc=fc is not None,
        fc_bias="encoder.fc.bias" in tensors,
        norm_before_fc="encoder.input_norm.weight" in tensors or bool(flags.get("norm_before_fc")),
        fc_norm="encoder.fc_norm.0.weight" in tensors or bool(flags.get("fc_norm")),
        mask_token=mask,
    )


def _fill(head: Eagle3, name: str, given: Mapping[str, Tensor], target: Any, dtype: str) -> None:
    """Give a head its tensors, and those of the target that it has none of its own for."""
    vocab, parts = head.config.vocab_size, head.parts
    places = draft_vocabulary(name, given, vocab)
    tensors = {key: value for key, value in given.items() if key not in UNREAD and key != "d2t"}
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach()[torch.arange(vocab)]
    if "lm_head.weight" not in tensors:
        known = torch.arange(parts.draft_vocab) + given.get("d2t", 0)
        tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach()[known]
    filled(head, tensors, name, dtype)
    head.places = places
    if parts.mask_token is not None:
        with torch.no_grad(), computing_in_float32(head.encoder):
            made = head.encoder(torch.split(head.mask_hidden.float(), parts.target_hidden, -1))
        head.mask_features = made.to(head.lm_head.weight.dtype)


def _wirings(name: str, flags: Mapping[str, Any], head: Eagle3, target_layers: int) -> Iterator[Wiring]:
    """Give every way to wire a head that its configuration leaves open."""

    def left_open(flag: str) -> list[bool]:
        return [bool(flags[flag])] if flag in flags else [False, True]

    before = left_open("norm_before_residual")
    after = left_open("norm_output") if head.mask_token is None else [False]  # it reads none of its own
    thetas: list[float | None] = [None]
    if head.config.rope_parameters.get("rope_theta") != OLDER_THETA:
        thetas.append(OLDER_THETA)
    layers = _layers(name, flags, head.parts.inputs, target_layers)
    return (Wiring(*way) for way in product(layers, before, after, thetas))


def _layers(name: str, flags: Mapping[str, Any], inputs: int, count: int) -> list[tuple[int, ...]]:
    ids = flags.get(LAYER_IDS)
    if inputs == 1 and (flags.get("use_aux_hidden_state") is False or ids is None):
        return [(LAST,)]
    given = (2, count // 2, count - 3) if ids is None else tuple(map(int, ids))
    found: list[tuple[int, ...]] = [given]
    if ids is not None:
        found.append(tuple(one + 1 for one in given))
    able = [one for one in found if len(one) == inputs and all(0 <= each < count for each in one)]
    if not able:
        raise ExportError(
            f"head {name} reads {inputs} hidden states of its target, those of {found[0]}; this target has {count} "
            "layers; take the head of this target"
        )
    return able


def _wire(head: Eagle3, wiring: Wiring) -> Features:
    return Features(wired(head, wiring).encoder, wiring.layers)


def wired(head: Eagle3, wiring: Wiring) -> Eagle3:
    """Wire a head; its rotary positions are made anew."""
    config = deepcopy(head.config)
    if wiring.theta is not None:
        config.rope_parameters = config.rope_parameters | {"rope_theta": wiring.theta}
    head.wiring, head.rotary_emb = wiring, LAYERS[config.model_type].rotary(config)
    return head


def in_words(wiring: Wiring) -> str:
    layers = "the last hidden state" if wiring.layers == (LAST,) else f"hidden states {wiring.layers}"
    residual = "a normed residual" if wiring.norm_before_residual else "a plain residual"
    output = "after its norm" if wiring.norm_output else "before its norm"
    theta = "" if wiring.theta is None else f", theta {wiring.theta:g}"
    return f"reads {layers}, with {residual}, its own state {output}{theta}"
