"""Grammars for the checks, and what one allows, asked of a guide that has never gone back."""

from collections.abc import Sequence
from math import inf

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...engines import Bundle, TrtSpecError
from ...runtime import Grammar, SamplingParams
from ...runtime.acceptance.filters.grammar import exclude
from ...runtime.grammars.compiler import Compiler

LETTERS = Grammar.regex("[A-Za-z_ (]{64,}")  # none of its first tokens can be the last
EXAMPLES = {
    Grammar.regex("([a-f]+ ?)*[a-f]"): "abc",
    Grammar.json_schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
            "required": ["name", "sizes"],
        }
    ): '{"name": "a", "sizes": [1]}',
    LETTERS: "a" * 64,
}


def usable(bundle: Bundle) -> list[Grammar]:
    """Return the grammars whose example the bundle's tokens can spell; none where llguidance is not installed."""
    tokenizer, found = Tokenizer.from_file(str(bundle.tokenizer_file)), []
    for grammar, example in EXAMPLES.items():
        tokens = tokenizer.encode(example, add_special_tokens=False).ids
        try:
            guide = Compiler(bundle).guide(SamplingParams(grammar=grammar))
        except TrtSpecError:  # the library is missing, or does not know such a tokenizer
            continue
        if guide is not None and guide.follow(tokens) == len(tokens):
            found.append(grammar)
    return found


def excluded(compiler: Compiler | None, params: SamplingParams, output: Sequence[int], vocab_size: int) -> Tensor:
    """Whether the grammar of a request excludes each token after this output."""
    guide = None if compiler is None else compiler.guide(params)
    if guide is None:
        return torch.zeros(vocab_size, dtype=torch.bool)
    guide.follow(output)
    return exclude(torch.zeros(1, 1, vocab_size), guide.allowed([], 1)[None])[0, 0] == -inf
