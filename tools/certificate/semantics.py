"""Check that requests mean under speculation what they mean without: stop rules, penalties, filters, log-probs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from math import ceil, inf
from typing import Any

from ...runtime import Decoder, SamplingParams
from ...runtime.grammars.compiler import Compiler
from .arbiter import Arbiter
from .effort import Effort
from .grammars import usable
from .lanes import side_by_side
from .probe import Probes
from .same_text import TOGETHER, PlainAnswer, ask_plain, compare
from .subject import Choice, Finding, Progress, Subject, combs_and_trees, draft_lengths, several, takes_trees

NEW_TOKENS = 24
COUPLED = SamplingParams(temperature=0.8, rule="coupled", seed=5)
GREEDY = SamplingParams()


Requests = list[tuple[tuple[int, ...], SamplingParams]]


def cases(subject: Subject, effort: Effort, batch: int) -> dict[str, Requests]:
    """Requests by what they are about; stop rules are cut out of the target's own text, so that they do apply."""
    new_tokens, vocab_size = subject.room(min(NEW_TOKENS, effort.new_tokens)), subject.bundle.tokenizer.vocab_size
    plain = [
        (prompt, replace(params, max_new_tokens=new_tokens))
        for prompt in subject.prompts(effort.prompts // 2)
        for params in (GREEDY, COUPLED)
    ]
    stop_strings, stop_tokens = [], []
    for (prompt, params), said in zip(plain, ask_plain(subject, plain, batch), strict=True):
        text, tokens = said.expected.text, said.expected.token_ids
        for at in (len(text) // 4, len(text) // 2):
            if stop := text[at : at + 5]:
                stop_strings.append((prompt, replace(params, stop=[stop, "\0"])))
        for at in (3, 6, 11):
            if at < len(tokens):
                stop_tokens.append((prompt, replace(params, stop_token_ids=[tokens[at]], logprobs=0)))
    eos = subject.bundle.tokenizer.eos_token_ids
    ends = [dict.fromkeys(eos, bias) for bias in (3.0, 6.0, 9.0)] if eos else []

    def with_each(*changes: dict[str, Any]) -> Requests:
        return [(prompt, replace(params, **change)) for change in changes for prompt, params in plain]

    found = {
        "stop strings": stop_strings,
        "stop tokens": stop_tokens,
        "end of sequence": with_each(*({"logit_bias": bias} for bias in ends)),
        "max tokens": with_each(*({"max_new_tokens": count, "logprobs": 0} for count in (1, 2, 5, 11))),
        "log-probs": with_each({"logprobs": 5}),
        "penalties": with_each(
            {"repetition_penalty": 1.5, "logprobs": 1},
            {"presence_penalty": 0.9, "frequency_penalty": 0.7},
        ),
        "min-p": with_each({"min_p": 0.1}),
        "logit bias": with_each({"logit_bias": {7 % vocab_size: 3.0, 11 % vocab_size: -inf, 13 % vocab_size: 2.0}}),
        "grammars": with_each(*({"grammar": one, "logprobs": 0} for one in usable(subject.bundle))),
        "all at once": with_each(
            {
                "repetition_penalty": 1.2,
                "frequency_penalty": 0.3,
                "top_k": 40,
                "top_p": 0.9,
                "min_p": 0.02,
                "logit_bias": {9 % vocab_size: 1.0},
                "logprobs": 3,
                "stop": ["\n\n", "self"],
                "ignore_eos": True,
            }
        ),
    }
    return {name: requests for name, requests in found.items() if requests}


def check(subject: Subject, probes: Probes, effort: Effort, progress: Progress) -> Iterator[Finding]:
    """With others in the batch, with and without speculation: what is alone is for the same text to compare."""
    progress("semantics: plain decoding", 0, 1)
    batch, probe = min(TOGETHER, subject.batch), probes["target"]
    asked = {name: ask_plain(subject, requests, batch) for name, requests in cases(subject, effort, batch).items()}
    judge = Arbiter(
        probe, subject.rounding, [lambda context: probe.distribution(context, batch=batch)], Compiler(subject.bundle)
    )
    with subject.open(batch) as decoder:
        lengths = draft_lengths(decoder)
        some = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
        trees: list[Choice] = [
            (drafter, comb) for drafter in decoder.drafters for comb in combs_and_trees(decoder, drafter)
        ]
        trees += several(decoder)

    def run(decoder: Decoder, numbered: tuple[int, str]) -> Finding:
        number, name = numbered
        progress(f"semantics: {name}", number, 1 + len(asked))
        again, choices = taking_turns(asked[name], decoder.drafters, some)
        able = [one for one in asked[name] if trees and takes_trees(one.params)]
        choices += islice(cycle(trees), len(able))
        return compare(decoder, again + able, choices, judge).finding("semantics", name)

    yield from side_by_side(subject, partial(subject.open, batch), run, [*enumerate(asked, 1)])


def taking_turns(
    asked: Sequence[PlainAnswer], drafters: Sequence[str], lengths: Sequence[int]
) -> tuple[list[PlainAnswer], list[Choice]]:
    """Each drafter with each draft length, each request at least twice, with another drafter each time if it can be."""
    many = len(drafters)
    pairs: list[tuple[int, int]] = []  # of a request and a drafter
    lengths_of_pairs = []
    for block in range(max(len(lengths), ceil(2 * len(asked) / many))):  # has all drafters and one length
        requests = [(block * many + place) % len(asked) for place in range(many)]
        turned = [[(one, (place + turn) % many) for place, one in enumerate(requests)] for turn in range(many)]
        pairs += min(turned, key=lambda some: sum(pair in pairs for pair in some))
        lengths_of_pairs += [lengths[block % len(lengths)]] * many
    return (
        [asked[request] for request, _ in pairs],
        [(drafters[drafter], length) for (_, drafter), length in zip(pairs, lengths_of_pairs, strict=True)],
    )
