"""The parameters of a request; each means exactly the same with speculation as without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ..grammars.grammar import Grammar


@dataclass(frozen=True)
class Parameters:
    """All fields, as filters read them, and what follows from them."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    draft_temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    show_special_tokens: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    rule: str = "rejection"
    lenience: float = 1.0
    grammar: Grammar | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def lenient(self) -> bool:
        """Whether the output is lossy, that is, not distributed as the target's."""
        return self.lenience < 1

    def banned(self, vocab_size: int) -> set[int]:
        """Return the tokens that never come out."""
        banned = {token for token, bias in self.logit_bias.items() if bias == -inf}
        if self.allowed_token_ids:
            banned |= set(range(vocab_size)).difference(self.allowed_token_ids)
        return banned

    @property
    def test(self) -> str:
        """The rule whose test its proposals take: greedy is coupled without noise, and lenience judges one by one."""
        if self.greedy or self.rule == "coupled":
            return "coupled"
        return "tokenwise" if self.lenient else self.rule

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p and min-p matter; a greedy pick passes them all."""
        return not self.greedy or self.lenient

    @property
    def own_draft_temperature(self) -> float:
        """The draft's temperature: the request's own if that is greedy or no other was asked for."""
        return self.temperature if self.greedy or self.draft_temperature is None else self.draft_temperature

    @property
    def draft_decides(self) -> bool:
        """Whether the text depends on what is proposed."""
        return self.lenient or self.test != "coupled"

    @property
    def keeps_its_draft(self) -> bool:
        """Whether the draft affects a text that is promised to be the same; then nothing else may affect the draft."""
        return self.draft_decides and (self.greedy or self.seed is not None)
