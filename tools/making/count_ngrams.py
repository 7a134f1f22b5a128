"""Count the n-grams of a text: which tokens followed each context, and how much a context leaves to its shorter one.

The rule is Witten and Bell's. If a context was seen C times before T different tokens, a token that followed it c times
gets the share c / (C + T), and what remains goes by what the context one token shorter says.
"""

import numpy as np

CONTINUATIONS = 64  # most of one context; what further ones would get is left to the shorter context

Arrays = dict[str, np.ndarray]
NONE: Arrays = dict.fromkeys(("keys", "seen", "size", "left", "tokens", "shares"), np.zeros(0, np.int64))


def count_ngrams(tokens: np.ndarray, vocab_size: int, order: int, most: int) -> tuple[Arrays, int]:
    """Return the arrays of a table, and the length of its longest context.

    The table keeps at most `most` entries: the contexts that were seen least often go.
    """
    tokens = tokens.astype(np.int64)
    seen = np.bincount(tokens, minlength=vocab_size)
    kinds = np.count_nonzero(seen)
    single = (seen + kinds / vocab_size) / (len(tokens) + kinds)
    node = np.zeros(len(tokens), np.int64)  # the context that ends at each token, 0 is the empty one
    levels, contexts = [NONE], 0
    for length in range(1, order):
        ends = np.arange(length - 1, len(tokens) - 1)
        keys, context = np.unique(node[ends] * vocab_size + tokens[ends - length + 1], return_inverse=True)
        node[ends] = contexts + context + 1
        levels.append({"keys": keys, **_followers(context, tokens[ends + 1], vocab_size)})
        contexts += len(keys)
    level = np.repeat(np.arange(order), [len(level["keys"]) for level in levels])
    table = {name: np.concatenate([level[name] for level in levels]) for name in NONE}
    kept = _often_seen(table, most)
    parent, token = np.divmod(table["keys"][kept], vocab_size)
    renumbered = np.concatenate([[0], kept.cumsum()])
    entries = np.repeat(kept, table["size"])
    arrays = {
        "single": single,
        "keys": renumbered[parent] * vocab_size + token,
        "left": table["left"][kept],
        "offsets": np.concatenate([[0], table["size"][kept].cumsum()]),
        "tokens": table["tokens"][entries],
        "shares": table["shares"][entries],
    }
    return arrays, int(level[kept].max(initial=0))


def _followers(context: np.ndarray, follower: np.ndarray, vocab_size: int) -> Arrays:
    """The tokens that followed each context, the most frequent first."""
    pairs, counts = np.unique(context * vocab_size + follower, return_counts=True)
    owner, token = np.divmod(pairs, vocab_size)
    seen, kinds = np.bincount(owner, counts).astype(np.int64), np.bincount(owner)
    commonest = np.lexsort((token, -counts, owner))
    rank = np.arange(len(pairs)) - np.repeat(kinds.cumsum() - kinds, kinds)
    kept = commonest[rank < CONTINUATIONS]
    shares = counts[kept] / (seen + kinds)[owner[kept]]
    left = 1 - np.bincount(owner[kept], shares)
    return {
        "seen": seen,
        "size": np.minimum(kinds, CONTINUATIONS),
        "left": left,
        "tokens": token[kept],
        "shares": shares,
    }


def _often_seen(table: Arrays, most: int) -> np.ndarray:
    """Mask of the contexts to keep. None is seen more often than its shorter one, so none loses its parent."""
    often = np.argsort(-table["seen"], kind="stable")
    fits = table["size"][often].cumsum() <= most
    return table["seen"] > (0 if fits.all() else table["seen"][often[fits.argmin()]])
