"""The plain transform is transformers' own, and the runtime's is it to float32."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from trt_spec.runtime import SamplingParams
from trt_spec.tools.certificate.exact import compared, scores

from ...kit.exact import warpers_of

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.5),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.dictionaries(st.integers(0, 23), st.floats(-3, 3), max_size=3),
)


@given(PARAMS, st.integers(0, 1000), st.lists(st.integers(0, 23), min_size=1, max_size=9))
def test_the_plain_transform_is_transformers(params: SamplingParams, seed: int, prompt: list[int]):
    logits = torch.randn(24, generator=torch.Generator().manual_seed(seed)) * 3
    biased = logits.double()
    for token, bias in params.logit_bias.items():
        biased[token] += bias
    warpers = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty), *warpers_of(params)])
    expected = warpers(torch.tensor([prompt]), biased[None])[0].softmax(-1)
    found = scores(logits, prompt[:1], prompt[1:], params).softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


def test_frequency_counts_each_occurrence_in_the_output_and_presence_the_first():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    found = scores(torch.zeros(4), [3, 3], [1, 1, 2], params)
    assert found.tolist() == [0, -1.0, -0.75, 0]


def test_greedy_compares_the_scores_and_coupled_adds_the_noise_of_the_index():
    logits = torch.randn(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(compared(logits, [1], [2], SamplingParams(top_k=3)), logits.double())
    coupled = SamplingParams(temperature=1.0, rule="coupled", seed=9)
    one, other = compared(logits, [1], [2], coupled), compared(logits, [1, 2], [], coupled)
    assert torch.equal(one, other), "the index in the sequence is the same"
    assert not torch.equal(one, compared(logits, [1], [2, 3], coupled))
