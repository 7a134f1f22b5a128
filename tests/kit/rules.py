"""Each rule has settings that tests of all rules ask for."""

from dataclasses import replace

from trt_spec.runtime import SamplingParams

SAMPLED = SamplingParams(temperature=1.0, seed=5, max_new_tokens=24, ignore_eos=True)
RULES = {
    "greedy": SamplingParams(max_new_tokens=24, ignore_eos=True),
    "rejection": SAMPLED,
    "tokenwise": replace(SAMPLED, rule="tokenwise", top_p=0.9),
    "coupled": replace(SAMPLED, rule="coupled", top_k=20),
}
