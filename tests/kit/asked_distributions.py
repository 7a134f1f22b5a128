"""The distributions that requests ask for, in float64, after each token of a text; written apart from the filters."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from trt_spec.runtime import SamplingParams

from .exact import warpers_of
from .grammars import AUTOMATON, SPELLED, state_after
from .points import Reweight


def distribution_asked_by(params: SamplingParams) -> Reweight:
    warpers = warpers_of(params)
    assert params.grammar in (None, SPELLED)

    def asked(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        scores, vocab = logits.double(), logits.shape[1]
        for token, bias in params.logit_bias.items():
            scores[:, token] += bias
        said = F.one_hot(torch.tensor([*output]), vocab).double()
        counts = said.cumsum(0) - said  # of what was said before each
        seen = (counts > 0) | F.one_hot(torch.tensor([*prompt]), vocab).sum(0).bool()
        weaker = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        scores = torch.where(seen, weaker, scores)
        scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if params.grammar:
            states = [state_after(output[:length]) for length in range(len(output))]
            allowed = [[state is not None and token in AUTOMATON[state] for token in range(vocab)] for state in states]
            scores = torch.where(torch.tensor(allowed), scores, -torch.inf)
        found: Tensor = warpers(None, scores)
        return found

    return asked
