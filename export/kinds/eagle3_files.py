"""Reads EAGLE-3 heads as people publish them, and decides by measurement what their configurations leave open.

original and SpecForge   tensors `midlayer.…`; the fields of its one layer lie in config.json itself
speculators              tensors `layers.0.…`; the fields lie in `transformer_layer_config`
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...engines import CALL, Contract, ExportError, State, keys_and_values
from ...engines.errors import one_line
from ..families import refuse_moving_positions
from ..hidden_states import LAST, Features
from ..oracle import computing_in_float32, hidden_states
from ..quality import Sample
from .check_head import check_head
from .eagle3 import LAYERS, Eagle3, Parts, Wiring
from .heads import HeadCheckpoint, LoadedHead, filled

OLDER_THETA = 10000.0  # of rotary positions, where readers of a head have not found what it says
WINDOW = 256  # tokens of the sample that are read together
PLACES = 2  # slots in a row that are measured: the second reads the head's own hidden state
WEAK = 0.2  # an overlap below which a head is probably wired wrong
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_FIELDS = {  # of the layers, which transformers reads
    "attention_bias", "attention_dropout", "head_dim", "hidden_act", "hidden_size", "initializer_range",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "pretraining_tp", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "vocab_size",
}  # fmt: skip
OWN_FIELDS = {
    "draft_vocab_size", "eagle_config", LAYER_IDS, "embed_requires_grad", "fc_norm", "norm_before_fc",
    "norm_before_residual", "norm_output", "speculators_config", "speculators_model_type", "speculators_version",
    "target_hidden_size", "transformer_layer_config", "use_aux_hidden_state",
}  # fmt: skip
MEANINGLESS = {  # here
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "layer_types", "model_type",
    "pad_token_id", "sliding_window", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
    "use_sliding_window", "max_window_layers", "has_no_defaults_at_init", "is_decoder", "target_model_type",
    "target_vocab_size",
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
        given = _Given.read(checkpoint, target, contract.layers, sample.vocab_size)
        head = _filled(given, target, contract.dtype)
        found = {way: measured(head, way, target, sample) for way in given.wirings()}
        chosen = max(found, key=lambda way: sum(found[way]))
        layer = given.config
        return LoadedHead(
            wired(head, chosen),
            Features(head.encoder, chosen.layers),
            layers=layer.num_hidden_layers,
            heads=layer.num_attention_heads,
            hidden=layer.hidden_size,
            vocab_size=layer.vocab_size,
            states=(
                State("hidden", (layer.hidden_size,), contract.dtype, CALL),
                *keys_and_values(layer.num_hidden_layers, layer.num_key_value_heads, layer.head_dim, contract.dtype),
            ),
            notes=_notes(checkpoint.name, found, chosen),
            readings={in_words(way): shares for way, shares in found.items()},
        )


def _notes(name: str, found: Mapping[Wiring, list[float]], chosen: Wiring) -> list[str]:
    notes = [f"{name} {in_words(chosen)}: it overlaps with its target by {_shares(found[chosen])}"]
    notes += [f"not taken: {in_words(way)}, by {_shares(own)}" for way, own in found.items() if way != chosen]
    if found[chosen][0] < WEAK:
        notes.append(
            f"{name} agrees with this target on few tokens, however it is wired; it was probably trained for another "
            "target, or for other text"
        )
    return notes


def _shares(found: list[float]) -> str:
    return ", then ".join(f"{share:.3f}" for share in found)


@dataclass(frozen=True)
class _Given:
    """What a checkpoint says of its head."""

    name: str
    tensors: dict[str, Tensor]
    config: Any  # of its layers, as transformers has it
    parts: Parts
    flags: Mapping[str, Any]
    target_layers: int

    @classmethod
    def read(cls, checkpoint: HeadCheckpoint, target: Any, layers: int, tokens: int) -> "_Given":
        name, fields = checkpoint.name, dict(checkpoint.fields)
        _refuse_unknown(name, fields)
        inner, eagle = (dict(fields.get(key) or {}) for key in ("transformer_layer_config", "eagle_config"))
        layer = inner or fields
        kind = str(layer.get("model_type", "llama"))
        if kind not in LAYERS:
            raise ExportError(f"head {name} has layers of the type {kind!r}, expected {' or '.join(LAYERS)}")
        if "sliding_attention" in (layer.get("layer_types") or ()):
            raise ExportError(f"head {name} has layers that see a sliding window, which this version cannot run")
        flags = {key: value for key, value in (fields | eagle).items() if value is not None}
        tensors = {_renamed(key): value for key, value in checkpoint.tensors().items()}
        config = _layer_config(name, kind, layer, tensors, target.config.vocab_size)
        parts = _parts(name, flags, tensors, config, target.config.hidden_size)
        if config.vocab_size < tokens:
            raise ExportError(
                f"head {name} is for a target of {config.vocab_size:,} tokens, this one has {tokens:,}; take the head "
                "of this target"
            )
        return cls(name, tensors, config, parts, flags, layers)

    def wirings(self) -> Iterator[Wiring]:
        """Give every way to wire the head that its configuration leaves open."""
        before = self._open("norm_before_residual")
        after = self._open("norm_output")
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


def _refuse_unknown(name: str, fields: Mapping[str, Any]) -> None:
    inner = fields.get("transformer_layer_config") or {}
    eagle = fields.get("eagle_config") or {}
    if not isinstance(inner, dict) or not isinstance(eagle, dict):
        raise ExportError(f"config.json of head {name} is damaged; download it again")
    unknown = sorted(set(fields) - LAYER_FIELDS - OWN_FIELDS - MEANINGLESS)
    unknown += sorted(set(inner) - LAYER_FIELDS - MEANINGLESS) + sorted(set(eagle) - EAGLE_FIELDS)
    if unknown:
        raise ExportError(
            f"head {name} has the field {unknown[0]!r} in its config.json, which this version does not know and which "
            "may change what it computes"
        )


def _renamed(key: str) -> str:
    key = key.removeprefix("model.").replace("midlayer.", "layers.0.")
    return f"encoder.{key}" if key.startswith(OURS) else key


def _layer_config(name: str, kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab: int) -> Any:
    from transformers import AutoConfig

    known = {key: value for key, value in fields.items() if key in LAYER_FIELDS and value is not None}
    for key in ("t2d", "embed_tokens.weight"):
        if key in tensors:
            vocab = tensors[key].shape[0]
    known["vocab_size"] = vocab
    if "head_dim" not in known and "hidden_size" in known and "num_attention_heads" in known:
        known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
    known.setdefault("num_hidden_layers", 1)
    try:
        config = AutoConfig.for_model(kind, **known, attn_implementation="eager")
    except Exception as error:  # each configuration class raises its own
        raise ExportError(f"config.json of head {name} is refused by transformers: {one_line(error)}") from error
    config.tie_word_embeddings = False
    refuse_moving_positions(name, config)
    return config


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


def _filled(given: _Given, target: Any, dtype: str) -> Eagle3:
    """Build the head with its tensors, and those of the target that it has none of its own for."""
    with torch.device("meta"):
        head = Eagle3(given.config, given.parts, Wiring(()))
    tensors = {key: value for key, value in given.tensors.items() if key not in UNREAD and key != "d2t"}
    places, chosen = _places(given), given.tensors.get("d2t")
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
    return wired(head, Wiring(()))


def _places(given: _Given) -> Tensor:
    """Return the place of each of the target's tokens among those that the head proposes, or the place behind them."""
    vocab, offsets = given.config.vocab_size, given.tensors.get("d2t")
    if offsets is None:
        return torch.arange(vocab)
    count = len(offsets)
    ids = offsets + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != count:
        raise ExportError(f"tensor d2t of head {given.name} names no {count} tokens of {vocab:,}; download it again")
    if "t2d" in given.tensors and not torch.equal(given.tensors["t2d"].nonzero()[:, 0], ids.sort().values):
        raise ExportError(f"tensors d2t and t2d of head {given.name} name different tokens; download it again")
    return torch.full((vocab,), count).scatter_(0, ids, torch.arange(count))


def wired(head: Eagle3, wiring: Wiring) -> Eagle3:
    """Wire a head; its rotary positions are made anew."""
    config = deepcopy(head.config)
    if wiring.theta is not None:
        config.rope_parameters = config.rope_parameters | {"rope_theta": wiring.theta}
    head.wiring, head.rotary_emb = wiring, LAYERS[config.model_type].rotary(config)
    return head


@torch.no_grad()
def measured(head: Eagle3, wiring: Wiring, target: Any, sample: Sample) -> list[float]:
    """Return the overlap of a head's law with its target's at temperature 1, Σ min(p, q), at its first places."""
    found, count = [0.0] * PLACES, 0
    wired(head, wiring)
    for begin in range(0, len(sample.tokens) - PLACES - 3, WINDOW):
        window = torch.tensor(sample.tokens[begin : begin + WINDOW])
        states, logits = hidden_states(target, window[None])
        law = logits[0, :, : sample.vocab_size].softmax(-1)
        with computing_in_float32(head):
            features = head.encoder([states[layer] for layer in wiring.layers])
            for place, normed in enumerate(head.unrolled(window[None, 1:], features[:, :-1], PLACES)):
                proposed = head.logits(normed)[0, :, : sample.vocab_size].softmax(-1)
                length = len(window) - 1 - PLACES  # slots of which every step has a token
                own = slice(1 + place, 1 + place + length)
                found[place] += float(torch.minimum(law[own], proposed[:length]).sum())
        count += length
    return [share / max(count, 1) for share in found]


def in_words(wiring: Wiring) -> str:
    layers = "the last hidden state" if wiring.layers == (LAST,) else f"hidden states {wiring.layers}"
    residual = "a normed residual" if wiring.norm_before_residual else "a plain residual"
    output = "behind its norm" if wiring.norm_output else "before its norm"
    theta = "" if wiring.theta is None else f", theta {wiring.theta:g}"
    return f"reads {layers}, with {residual}, its own state {output}{theta}"
