"""Pearson's χ² compares the tokens that leave the real Decoder with the exact distribution."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.tools.certificate.chi_squared import statistic, tail

from .bundles import Pair
from .costs import SIBLINGS, known_costs, table
from .exact import PROMPT, exact_distribution


def draw(
    pair: Pair,
    params: SamplingParams,
    samples: int,
    k: int | str | EntropyRule,
    drafter: str,
    depth: int,
    prompt: Sequence[int] = PROMPT,
) -> Counter[tuple[int, ...]]:
    """Continuations by `depth` tokens out of the real Decoder, each with a seed of its own.

    The first token comes with the prompt, without a proposal, and is left out.
    """
    beside = {"4/8": 3.0} if drafter == "model" else SIBLINGS  # auto grows this tree, or hangs siblings
    costs = table(batches=(1,), beside=beside, reading_ms={"model": (0.0, 0.01)})  # little, as answers are short
    with known_costs(costs), Decoder.open(pair.bundle, max_batch=256) as decoder:
        requests = [
            decoder.submit(
                prompt,
                replace(params, max_new_tokens=1 + depth, ignore_eos=True, seed=seed),
                draft_length=k,
                drafter=drafter,
            )
            for seed in range(samples)
        ]
        while decoder.step():
            pass
        proposed = decoder.speculation.proposed
        assert 0 < decoder.speculation.accepted < proposed or k == 0, "the test must see both verdicts"
        assert decoder.speculation.beside or (k, drafter) != ("auto", "model"), "and trees"
    return Counter(tuple(request.token_ids[1:]) for request in requests)


def p_value(observed: Counter[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    return tail(*statistic(observed, joint))


def p_value_of(
    pair: Pair,
    params: SamplingParams,
    samples: int,
    k: int | str | EntropyRule,
    drafter: str = "model",
    depth: int | None = None,
    prompt: Sequence[int] = PROMPT,
) -> float:
    depth = depth or (k + 2 if isinstance(k, int) else 4)
    observed = draw(pair, params, samples, k, drafter, depth, prompt)
    return p_value(observed, exact_distribution(pair.exact, params, depth, prompt))
