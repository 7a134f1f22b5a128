"""Reads EAGLE-3 heads as people publish them, and decides by measurement what their configurations leave open.

original and SpecForge   tensors `midlayer.…`; the fields of its one layer lie in config.json itself
speculators              tensors `layers.0.…`; the fields lie in `transformer_layer_config`
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...engines import Contract, ExportError, Masks
from ..checking.oracle import computing_in_float32
from ..checking.quality import Sample
from ..tracing.hidden_states import LAST, Features
from ..tracing.repeating import depth_of
from .check_head import check_head
from .eagle3 import Eagle3, Parts, Wiring
from .heads import HeadCheckpoint, LoadedHead, filled
from .layers import LAYER_FIELDS, LAYERS, MEANINGLESS, layer_config, refuse_unknown
from .slots import draft_vocabulary, loaded, measured

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


class Eagle3Kind:
    name = "eagle3"
    check = staticmethod(check_head)

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        named = str([fields.get("speculators_model_type"), fields.get("architectures")]).lower().replace("-", "")
        if "eagle3" in named:
            return True
        first = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
        return bool(first & set(shapes)) or (not shapes and "draft_vocab_size" in fields)

    def load(self, checkpoint: HeadCheckpoint, target: Any, contract: Contract, sample: Sample) -> LoadedHead:
        given = _Given.read(checkpoint, target, depth_of(target), sample.vocab_size)
        head = _filled(given, target, contract.dtype)
        found = {
            way: measured(wired(head, way), Features(head.encoder, way.layers), target, sample)
            for way in given.wirings()
        }
        chosen = max(found, key=lambda way: sum(found[way]))
        readings = {in_words(way): own for way, own in found.items()}
        features, mask = Features(head.encoder, chosen.layers), given.parts.mask_token
        masks = None if mask is None else Masks(mask)
        return loaded(checkpoint.name, wired(head, chosen), features, contract, readings, in_words(chosen), masks)


class PEagleKind(Eagle3Kind):
    """EAGLE-3 that says all tokens of a round in one pass, behind masks: `mask_hidden` stands for their features."""

    name = "peagle"

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return fields.get("speculators_model_type") == "peagle" or "mask_hidden" in shapes


@dataclass(frozen=True)
class _Given:
    """The head as its checkpoint describes it."""

    name: str
    tensors: dict[str, Tensor]
    config: Any  # of its layers, as transformers has it
    parts: Parts
    flags: Mapping[str, Any]
    target_layers: int

    @classmethod
    def read(cls, checkpoint: HeadCheckpoint, target: Any, layers: int, tokens: int) -> "_Given":
        name, fields = checkpoint.name, dict(checkpoint.fields)
        inner, eagle = fields.get("transformer_layer_config") or {}, fields.get("eagle_config") or {}
        known = (fields, LAYER_FIELDS | OWN_FIELDS | MEANINGLESS), (inner, LAYER_FIELDS | MEANINGLESS)
        refuse_unknown(name, *known, (eagle, EAGLE_FIELDS))
        flags = {key: value for key, value in (fields | eagle).items() if value is not None}
        tensors = {_renamed(key): value for key, value in checkpoint.tensors().items()}
        vocab = target.config.vocab_size
        for key in ("t2d", "embed_tokens.weight"):
            vocab = tensors[key].shape[0] if key in tensors else vocab
        config = layer_config(name, inner or fields, vocab)
        parts = _parts(name, flags, tensors, config, target.config.hidden_size)
        if isinstance(checkpoint.kind, PEagleKind):
            parts = replace(parts, mask_token=_mask_token(name, flags, config.vocab_size))
        if config.vocab_size < tokens:
            raise ExportError(
                f"head {name} is for a target of {config.vocab_size:,} tokens, this one has {tokens:,}; take the head "
                "of this target"
            )
        return cls(name, tensors, config, parts, flags, layers)

    def wirings(self) -> Iterator[Wiring]:
        """Give every way to wire the head that its configuration leaves open."""
        before = self._open("norm_before_residual")
        after = self._open("norm_output") if self.parts.mask_token is None else [False]  # it reads none of its own
        thetas: list[float | None] = [None]
        if self.config.rope_parameters.get("rope_theta") != OLDER_THETA:
            thetas.append(OLDER_THETA)
        for layers, residual, output, theta in product(self._layers(), before, after, thetas):
            yield Wiring(layers, residual, output, theta)

    def _open(self, flag: str) -> list[bool]:
        return [bool(self.flags[flag])] if flag in self.flags else [False, True]

    def _layers(self) -> list[tuple[int, ...]]:
        ids = self.flags.get(LAYER_IDS)
        if self.parts.inputs == 1 and (self.flags.get("use_aux_hidden_state") is False or ids is None):
            return [(LAST,)]
        n = self.target_layers
        given = (2, n // 2, n - 3) if ids is None else tuple(map(int, ids))
        found: list[tuple[int, ...]] = [given]
        if ids is not None:
            found.append(tuple(one + 1 for one in given))
        able = [one for one in found if len(one) == self.parts.inputs and all(0 <= each < n for each in one)]
        if not able:
            raise ExportError(
                f"head {self.name} reads {self.parts.inputs} hidden states of its target, those of {found[0]}; this "
                f"target has {n} layers; take the head of this target"
            )
        return able


def _renamed(key: str) -> str:
    key = key.removeprefix("model.").replace("midlayer.", "layers.0.")
    return f"encoder.{key}" if key.startswith(OURS) else key


def _parts(name: str, flags: Mapping[str, Any], tensors: Mapping[str, Tensor], config: Any, hidden: int) -> Parts:
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
    )


def _mask_token(name: str, flags: Mapping[str, Any], vocab: int) -> int:
    token = flags.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab:
        raise ExportError(
            f"config.json of head {name} has the mask_token_id {token!r}, expected one of its {vocab:,} tokens; "
            "download it again"
        )
    return token


def _filled(given: _Given, target: Any, dtype: str) -> Eagle3:
    """Build the head with its tensors, and those of the target that it has none of its own for."""
    with torch.device("meta"):
        head = Eagle3(given.config, given.parts, Wiring(()))
    tensors = {key: value for key, value in given.tensors.items() if key not in UNREAD and key != "d2t"}
    places = draft_vocabulary(given.name, given.tensors, given.config.vocab_size)
    chosen = given.tensors.get("d2t")
    for key, module in (
        ("embed_tokens.weight", target.get_input_embeddings()),
        ("lm_head.weight", target.get_output_embeddings()),
    ):
        if key not in tensors:
            theirs = module.weight.detach()
            own = chosen if key.startswith("lm_head") else None
            ids = torch.arange(given.config.vocab_size if own is None else len(own))
            tensors[key] = theirs[ids if own is None else own + ids]
    filled(head, tensors, given.name, dtype)
    head.places = places
    if given.parts.mask_token is not None:
        with torch.no_grad(), computing_in_float32(head.encoder):
            made = head.encoder(torch.split(head.mask_hidden.float(), given.parts.target_hidden, -1))
        head.mask_features = made.to(head.lm_head.weight.dtype)
    return wired(head, Wiring(()))


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
    output = "behind its norm" if wiring.norm_output else "before its norm"
    theta = "" if wiring.theta is None else f", theta {wiring.theta:g}"
    return f"reads {layers}, with {residual}, its own state {output}{theta}"
