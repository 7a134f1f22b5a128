"""Property: whatever a request asks for, under greedy and coupled it gets with speculation what it gets without."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trt_spec.runtime import Decoder, Grammar, RequestError, SamplingParams
from trt_spec.tools.certificate.arbiter import log_probabilities_agree

from ..kit.bundles import Pair

PROMPTS = st.lists(st.integers(2, 63), min_size=1, max_size=12)
LETTERS = st.text("abcdefgh ", min_size=1, max_size=3)


def asked(least: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**fields, min_tokens=min(least, fields["max_new_tokens"]))


FREE = st.builds(
    asked,
    least=st.sampled_from([0, 0, 3, 12]),
    max_new_tokens=st.integers(1, 24),
    temperature=st.one_of(st.just(0.0), st.floats(0.3, 2.0)),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.6, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, 63), st.sampled_from([-float("inf"), -2.0, 3.0]), max_size=3),
    stop=st.lists(LETTERS, max_size=2),
    stop_token_ids=st.lists(st.integers(0, 63), max_size=2),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
    rule=st.just("coupled"),
)
GRAMMARS = (
    Grammar.regex("([a-h]{1,3} )*[a-h]+[0-9]{0,2}"),
    Grammar.lark('start: "A" start "B" | /[a-z]{1,4}/ | start " " start'),
    Grammar.choice(["abc", "ab cd", "gh", "habcdefgh"]),
)
ASKED = st.one_of(
    FREE,
    st.builds(
        lambda params, grammar: replace(params, grammar=grammar, ignore_eos=False, min_tokens=0),
        FREE,
        st.sampled_from(GRAMMARS),
    ),
)


@pytest.fixture(scope="module")
def decoders(llama: Pair):
    """One that decodes alone and one that decodes together."""
    with Decoder.open(llama.bundle, max_batch=1) as alone, Decoder.open(llama.bundle, max_batch=3) as together:
        yield alone, together


# Tiny float32 models: no scores are near enough to swap, so tokens are equal and nothing is arbitrated.
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_output_equals_plain_decodings(decoders, data: st.DataObject):
    alone, together = decoders
    requests = data.draw(st.lists(st.tuples(PROMPTS, ASKED), min_size=1, max_size=5))
    drafters = st.sampled_from(together.drafters)
    started = [
        together.submit(prompt, params, drafter=data.draw(drafters), draft_length=data.draw(st.integers(1, 16)))
        for prompt, params in requests
    ]
    while together.step():
        pass
    for (prompt, params), request in zip(requests, started, strict=True):
        try:
            [expected] = alone.generate([prompt], params, draft_length=0)
        except RequestError as error:  # all that the grammar allows may be banned
            with pytest.raises(RequestError, match=f"^{re.escape(str(error))}$"):
                request.output()
            continue
        found = request.output()
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert (found.finish_reason, found.usage) == (expected.finish_reason, expected.usage)
        assert log_probabilities_agree(found.logprobs, expected.logprobs, 1e-4)
        pieces = request.take()
        assert "".join(piece.text for piece in pieces) == found.text
        assert tuple(token for piece in pieces for token in piece.token_ids) == found.token_ids
        assert tuple(one for piece in pieces for one in piece.logprobs) == (found.logprobs or ())
