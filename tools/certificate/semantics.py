"""What a request asks for means under speculation what it means without: stop rules, penalties, filters, log-probs."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from ...runtime import SamplingParams
from .arbiter import Arbiter
from .probe import Probe
from .same_text import TOGETHER, ask_alone, compare
from .subject import Finding, Progress, Subject, draft_lengths

NEW_TOKENS = 24
COUPLED = SamplingParams(temperature=0.8, rule="coupled", seed=5)
GREEDY = SamplingParams()


Requests = list[tuple[tuple[int, ...], SamplingParams]]


def cases(subject: Subject) -> dict[str, Requests]:
    """Requests by what they are about; stop rules are cut out of the target's own text, so that they do apply."""
    new_tokens, vocab_size = subject.room(NEW_TOKENS), subject.bundle.tokenizer.vocab_size
    plain = [
        (prompt, replace(params, max_new_tokens=new_tokens))
        for prompt in subject.prompts()[:3]
        for params in (GREEDY, COUPLED)
    ]
    stop_strings, stop_tokens = [], []
    for (prompt, params), said in zip(plain, ask_alone(subject, plain), strict=True):
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


def check(subject: Subject, progress: Progress) -> Iterator[Finding]:
    """Each request takes the next of all drafters and draft lengths."""
    progress("semantics: plain decoding")
    asked = {name: ask_alone(subject, requests) for name, requests in cases(subject).items()}
    probe = Probe(subject)
    try:
        with subject.open(min(TOGETHER, subject.batch)) as decoder:
            drafters, lengths = decoder.drafters, draft_lengths(decoder)
            for name, requests in asked.items():
                progress(f"semantics: {name}")
                judge = Arbiter(probe, subject.rounding)
                # So that each request meets all drafters, and these all lengths in turn.
                tally = compare(
                    decoder,
                    [one for one in requests for _ in drafters],
                    drafters,
                    [k for k in lengths for _ in drafters],
                    judge,
                )
                yield tally.finding("semantics", name)
    finally:
        probe.close()
