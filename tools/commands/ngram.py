"""Count which tokens follow which in a text, and keep the table in the bundle: a draft that needs no model.

The text should be like what the model will write. Requests then draft from the table with --drafter ngram.
"""

import argparse
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ...engines import Bundle, RequestError
from ...engines.bundle import NGRAMS, put_file
from ..console import in_bytes
from ..flags.sampling import add_number
from ..making.count_ngrams import count_ngrams
from ..text_files import read_text

ORDERS = (1, 8)
LINES = 1000  # encoded at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="the folder that export-models wrote")
    parser.add_argument("--text", required=True, metavar="F", type=Path, help="a UTF-8 file to count")
    add_number(parser, "--order", 3, "tokens of the longest n-gram; 1 counts single tokens")
    add_number(parser, "--most", 1_000_000, "entries to keep, of the most frequent contexts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.order > ORDERS[1]:
        raise RequestError(f"--order is {arguments.order}, expected a whole number from {ORDERS[0]} to {ORDERS[1]}")
    text = read_text(arguments.text, "text")
    bundle = Bundle.open(arguments.bundle)
    from tokenizers import Tokenizer

    from ...runtime.drafters.ngram_table import SUFFIX, to_bytes

    tokens = _encode(text, Tokenizer.from_file(str(bundle.tokenizer_file)))
    if len(tokens) < max(2, arguments.order):
        raise RequestError(
            f"text {arguments.text} has {len(tokens)} tokens, expected at least {max(2, arguments.order)} for n-grams "
            f"of {arguments.order}; give a longer one"
        )
    arrays, longest = count_ngrams(tokens, bundle.tokenizer.vocab_size, arguments.order, arguments.most)
    content = to_bytes(arrays, longest)
    put_file(bundle, NGRAMS, SUFFIX, content)
    found = {
        "bundle": str(arguments.bundle),
        "tokens": len(tokens),
        "order": longest + 1,
        "contexts": len(arrays["keys"]),
        "entries": len(arrays["tokens"]),
        "bytes": len(content),
    }
    print(json.dumps(found) if arguments.json else _report(found))
    return 0


def _encode(text: str, tokenizer: Any) -> np.ndarray:
    lines = text.splitlines(keepends=True)
    parts = ["".join(lines[first : first + LINES]) for first in range(0, len(lines), LINES)]
    encoded = (tokenizer.encode(part, add_special_tokens=False).ids for part in parts)
    return np.fromiter(chain.from_iterable(encoded), np.int64)


def _report(found: dict[str, Any]) -> str:
    return (
        f"{found['bundle']}: n-grams of up to {found['order']} from {found['tokens']:,} tokens, {found['contexts']:,} "
        f"contexts with {found['entries']:,} continuations, {in_bytes(found['bytes'])}; use them with --drafter ngram"
    )
