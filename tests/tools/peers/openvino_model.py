"""A Llama checkpoint as a graph in OpenVINO's own operations: the cache is its state, as their exporter has it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as ops
from openvino_tokenizers import convert_tokenizer
from safetensors.numpy import load_file
from transformers import AutoTokenizer

SIDE_FILES = ("config.json", "generation_config.json")


class Graph:
    """Builds the graph of one checkpoint, layer by layer."""

    def __init__(self, checkpoint: Path) -> None:
        self.config = json.loads((checkpoint / "config.json").read_text())
        self.weights = load_file(checkpoint / "model.safetensors")
        self.sinks: list[Any] = []
        self.ids = self._input("input_ids", [-1, -1])
        self.mask = self._input("attention_mask", [-1, -1])
        self.positions = self._input("position_ids", [-1, -1])
        self.rows = self._input("beam_idx", [-1], np.int32)
        self.batch = ops.gather(ops.shape_of(self.ids), [0], 0)

    @staticmethod
    def _input(name: str, shape: list[int], dtype: Any = np.int64) -> Any:
        parameter = ops.parameter(shape, dtype, name=name)  # their passes look for both names
        parameter.output(0).set_names({name})
        return parameter

    def model(self) -> openvino.Model:
        x = ops.gather(self.weights["model.embed_tokens.weight"], self.ids, 0)  # [B, S, hidden]
        cos, sin = self._rotary()
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = ops.add(x, self._attention(self._norm(x, prefix + "input_layernorm"), prefix, cos, sin))
            x = ops.add(x, self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix + "mlp."))
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        logits = ops.result(self._linear(self._norm(x, "model.norm"), head))
        logits.output(0).set_names({"logits"})
        return openvino.Model([logits], self.sinks, [self.ids, self.mask, self.positions, self.rows])

    def _linear(self, x: Any, name: str) -> Any:
        return ops.matmul(x, self.weights[name + ".weight"], False, True)

    def _norm(self, x: Any, name: str) -> Any:
        mean = ops.reduce_mean(ops.power(x, np.float32(2)), [-1], True)
        root = ops.sqrt(ops.add(mean, np.float32(self.config["rms_norm_eps"])))
        return ops.multiply(ops.divide(x, root), self.weights[name + ".weight"])

    def _mlp(self, x: Any, prefix: str) -> Any:
        gate = ops.swish(self._linear(x, prefix + "gate_proj"))
        return self._linear(ops.multiply(gate, self._linear(x, prefix + "up_proj")), prefix + "down_proj")

    def _rotary(self) -> tuple[Any, Any]:
        width, base = self.config["head_dim"], self.config["rope_parameters"]["rope_theta"]
        speed = (1 / base ** (np.arange(0, width, 2) / width)).astype(np.float32)
        angles = ops.multiply(ops.unsqueeze(ops.convert(self.positions, np.float32), [2]), speed)
        both = ops.unsqueeze(ops.concat([angles, angles], 2), [1])  # [B, 1, S, width]
        return ops.cos(both), ops.sin(both)

    def _attention(self, x: Any, prefix: str, cos: Any, sin: Any) -> Any:
        heads, kv_heads = (self.config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        query, key, value = (
            self._split(self._linear(x, f"{prefix}self_attn.{kind}_proj"), count)
            for kind, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query, key = (ops.add(ops.multiply(one, cos), ops.multiply(self._turned(one), sin)) for one in (query, key))
        key, value = self._cached(prefix + "key", key), self._cached(prefix + "value", value)
        mixed = ops.scaled_dot_product_attention(query, key, value, self._seen())
        flat = ops.reshape(ops.transpose(mixed, [0, 2, 1, 3]), [0, 0, -1], True)
        return self._linear(flat, prefix + "self_attn.o_proj")

    def _split(self, x: Any, heads: int) -> Any:
        return ops.transpose(ops.reshape(x, [0, 0, heads, self.config["head_dim"]], True), [0, 2, 1, 3])

    def _turned(self, x: Any) -> Any:
        first, second = ops.split(x, -1, 2).outputs()
        return ops.concat([ops.negative(second), first], -1)

    def _cached(self, name: str, new: Any) -> Any:
        """Append to the state, keep it, and repeat each head for the queries that share it."""
        kv_heads, width = self.config["num_key_value_heads"], self.config["head_dim"]
        empty = ops.broadcast(np.float32(0), ops.concat([self.batch, np.array([kv_heads, 0, width])], 0))
        past = ops.read_value(empty, name, np.float32, openvino.PartialShape([-1, kv_heads, -1, width]))
        whole = ops.concat([ops.gather(past, self.rows, 0), new], 2)
        self.sinks.append(ops.assign(whole, name))
        shared = self.config["num_attention_heads"] // kv_heads
        wide = ops.broadcast(ops.unsqueeze(whole, [2]), np.array([1, 1, shared, 1, 1]), broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, [0, kv_heads * shared, -1, width], True)

    def _seen(self) -> Any:
        """Whether query i sees key j, [1, 1, S, T]: the last query sees all."""
        queries, keys = (ops.gather(ops.shape_of(one), np.int64(1), 0) for one in (self.ids, self.mask))
        last = ops.range(ops.subtract(keys, queries), keys, np.int64(1), "i64")
        seen = ops.less_equal(ops.range(np.int64(0), keys, np.int64(1), "i64"), ops.unsqueeze(last, [1]))
        return ops.unsqueeze(seen, [0, 1])


def save_openvino(checkpoint: Path, out: Path) -> Path:
    out.mkdir(parents=True)
    openvino.save_model(Graph(checkpoint).model(), out / "openvino_model.xml", compress_to_fp16=False)
    both = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    for name, tokenizer in zip(("tokenizer", "detokenizer"), both, strict=True):
        openvino.save_model(tokenizer, out / f"openvino_{name}.xml")  # speculation compares the two models' own
    for name in SIDE_FILES:
        if (checkpoint / name).exists():
            shutil.copy(checkpoint / name, out / name)
    return out
