"""Under the coupled rule a seed decides each token: that whose exact score and noise come to most.

So trees take few samples there. Whatever makes outputs distributed otherwise, by a total variation, makes at least that
share of them other than their seeds say. That the noise is sound, a χ² over a single line shows.
"""

from dataclasses import replace
from math import ceil, log

from ...runtime import Decoder, SamplingParams
from .arbiter import Arbiter
from .exact import compared
from .first_tokens import DEPTH, Case, Logits, Tokens
from .subject import Finding, is_tree, width


def decided_by_seeds(case: Case) -> bool:
    return case.rule == "coupled" and is_tree(case.drafter, case.draft_length)


def samples_needed(total_variation: float, power: float) -> int:
    """So many hold, with that probability, one of a share as large as the total variation."""
    return ceil(log(1 - power) / log(1 - total_variation))


def compare(decoder: Decoder, case: Case, samples: int, logits: Logits, judge: Arbiter) -> Finding:
    """Each sample with what its seed says."""
    params = [replace(case.params, seed=seed) for seed in range(samples)]
    decoder.forget_outputs()  # of other cases
    outputs = decoder.generate([case.prompt] * samples, params, draft_length=case.draft_length, drafter=case.drafter)
    widest = width(case.drafter, case.draft_length, DEPTH)
    ties: list[str] = []
    bugs: list[str] = []
    for one, output in zip(params, outputs, strict=True):
        expected = tokens_of_seed(logits, case.prompt, one)
        found = judge.judge(case.prompt, one, output.token_ids, expected, widest, decoder.max_batch)
        if found is not None:
            (ties if found.near_tie else bugs).append(str(found))
    detail = f"{samples} samples, each what its seed says"
    if ties:
        detail += f", but for {len(ties)} near ties: {ties[0]}"
    if bugs:
        detail = f"{len(bugs)} of {samples} samples are not what their seeds say: {bugs[0]}"
    return Finding("distribution", str(case), not bugs, detail, {"samples": samples, "near_ties": ties, "bugs": bugs})


def tokens_of_seed(logits: Logits, prompt: Tokens, params: SamplingParams) -> Tokens:
    tokens: Tokens = ()
    while len(tokens) < params.max_new_tokens:
        tokens = *tokens, int(compared(logits((*prompt, *tokens), 1), prompt, tokens, params).argmax())
    return tokens
