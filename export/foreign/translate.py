"""Write beside a draft with tokens of its own what the runtime must know of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ...engines import ModelEntry, open_engines
from ...engines.bundle import GRAPH, TOKENIZER, write_tables
from ..checking.check import in_float32
from ..checking.quality import engine_logits
from ..checkpoints.vocabulary import Vocabulary
from .both_ways import COMMON, TEXT, WAYS, compare, in_words
from .common import common_tokens


def translate(
    folder: Path,
    ours: Vocabulary,
    own: Vocabulary,
    entry: ModelEntry,
    known: tuple[Sequence[int], Tensor] | None,
    temperatures: Sequence[float],
) -> tuple[str, ModelEntry]:
    """Write the tokenizer and the tables; say what target and draft have in common, and which way to propose is better.

    That is measured on a text of the target's tokens whose logits [L, V] are `known`; without it the tokens decide.
    """
    common, size = common_tokens(ours, own), ours.entry().vocab_size
    own.save(folder / TOKENIZER)
    write_tables(folder, common.tables)
    drafter, acceptance, both = COMMON if 2 * len(common.target) >= size else TEXT, dict[str, dict[str, float]](), None
    if known is not None:
        with in_float32(folder / GRAPH, entry.contract) as model:
            [engine] = open_engines("onnxruntime", [model])

            def reads(tokens: list[int]) -> Tensor:
                return engine_logits(engine, tokens[-entry.contract.max_length :])[-1, : common.vocab_size]

            both = compare(*known, ours.tokenizer, own.tokenizer, common, reads)
            engine.close()
    if both is not None:
        drafter = both.better(temperatures)
        acceptance = {way: both.by_temperature(way, temperatures) for way in WAYS}
    said = in_words(own.name, common, size, acceptance, drafter)
    return said, replace(entry, tokens=common.entry(drafter, acceptance))
