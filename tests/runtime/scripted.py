"""A decoder whose models say what a script says: engines that need no weights, behind the real loop."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trt_spec.engines import Bundle, Contract, Engine, ModelEntry, Step, TokenizerEntry, keys_and_values
from trt_spec.runtime import Decoder
from trt_spec.runtime.lengths.costs import Costs

from ..kit.models import bytes_to_symbols

NextToken = Callable[[Sequence[int]], int]  # from the whole context to the next token
EOS = 256
BYTES = bytes_to_symbols()


class ScriptedEngine(Engine):
    """An engine whose logits favour `next_token(context)`; like a model, it reads the context from its cache."""

    reads_together = True
    device = "cpu"

    def __init__(self, contract: Contract, next_token: NextToken) -> None:
        self.contract, self.next_token = contract, next_token
        self.height = 20.0  # of the logit it favours
        self.on_run: Callable[[], None] = lambda: None
        self.widths: list[tuple[int, int]] = []  # batch and width of every run

    def step(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> Step:
        ids, start, ancestors, logit_rows = (inputs[name] for name in ("input_ids", "start", "ancestors", "logit_rows"))
        logits = outputs["logits"]
        (batch, width), rows = ids.shape, logits.shape[1]
        cache = inputs["past_key_0"][:, 0, :, 0]  # [rows, T]: the token ids themselves

        def run() -> None:
            self.widths.append((batch, width))
            self.on_run()
            logits.zero_()
            for row in range(batch):
                at = int(start[row])
                assert at + width <= cache.shape[1], "a call may not write past the end of the cache"
                cache[row, at : at + width] = ids[row]
                for index in range(rows):
                    own = ids[row, ancestors[row, logit_rows[row, index]]]
                    context = [*cache[row, :at].long().tolist(), *own.tolist()]
                    logits[row, index, self.next_token(context)] = self.height

        return Step(inputs, outputs, run)


def byte_tokenizer(extra: Sequence[str] = ()) -> Tokenizer:
    """Tokens 0 … 255 are the bytes themselves, 256 is the end of text, `extra` follow as ordinary tokens."""
    names = [*BYTES, "</s>", *("".join(BYTES[byte] for byte in text.encode()) for text in extra)]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def scripted_decoder(
    folder: Path,
    target: NextToken,
    draft: NextToken | None = None,
    max_batch: int = 8,
    extra: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    max_length: int = 2048,
    costs: Costs | None = None,
    draft2: NextToken | None = None,
    **fields: Any,
) -> Decoder:
    """The engines are at `decoder.target.engine` and `decoder.draft.engine`, or those of `decoder.drafts`."""
    tokenizer = tokenizer or byte_tokenizer(extra)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    contract = Contract(1, 1, keys_and_values(1, 1, 1, "float32"), size, max_length, "float32")
    given = {"target": target, "draft": draft, "draft2": draft2}
    scripts = {name: script for name, script in given.items() if script is not None}
    models = {
        name: ModelEntry("draft" if name != "target" else name, "scripted", "none", 1, contract) for name in scripts
    }
    vocabulary = TokenizerEntry(**({"vocab_size": size, "bos_token_id": None, "eos_token_ids": (EOS,)} | fields))
    bundle = Bundle(folder, models, vocabulary, {}, {})

    def open_engines(
        engines: Sequence[str], graphs: Sequence[tuple[Path, Contract]], device: str, **_: object
    ) -> list[ScriptedEngine]:
        return [ScriptedEngine(contract, scripts[graph.parent.name]) for graph, contract in graphs]

    with (
        patch("trt_spec.runtime.scheduling.opening.open_engines", open_engines),
        patch("trt_spec.runtime.decoder.read_costs", lambda *_: costs),
    ):
        return Decoder.open(bundle, max_batch=max_batch)


def says(tokens: Sequence[int], prompt_length: int, end: int = EOS) -> NextToken:
    """After a prompt of this length, say these tokens, then the end."""

    def next_token(context: Sequence[int]) -> int:
        at = len(context) - prompt_length
        return tokens[at] if 0 <= at < len(tokens) else end

    return next_token


def encoded(text: str) -> list[int]:
    return list(text.encode())


__all__ = ["EOS", "ScriptedEngine", "byte_tokenizer", "encoded", "says", "scripted_decoder"]
