"""The parameters of a request, and what each is for; it means exactly the same with speculation as without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ..grammars.grammar import Grammar

RULES = ("rejection", "tokenwise", "coupled")


@dataclass(frozen=True)
class ParameterFields:
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


HELP = {
    "max_new_tokens": "stop after this many tokens",
    "temperature": "0 is greedy",
    "draft_temperature": "temperature of the draft; 0 proposes its likeliest token (default: the request's own)",
    "top_k": "keep the k likeliest tokens (0 = off)",
    "top_p": "keep the smallest set of likeliest tokens that holds this much probability",
    "min_p": "keep tokens at least this likely relative to the likeliest",
    "repetition_penalty": "divide the score of tokens in prompt and output by this",
    "presence_penalty": "subtract this from the score of tokens in the output",
    "frequency_penalty": "subtract this for each time a token is in the output",
    "logit_bias": "add this to the score of one token",
    "allowed_token_ids": "write this token and others that are allowed, but none else",
    "stop": "end the output before this text",
    "stop_token_ids": "end the output with this token; under a grammar only where its text is complete",
    "include_stop": "keep the text of `stop` at the output's end",
    "show_special_tokens": "write special tokens into the text, but not the one that ends it",
    "ignore_eos": "do not end with the model's end-of-sequence token",
    "min_tokens": "before this many tokens neither end of sequence nor stop tokens may come (stop texts may)",
    "seed": "source of all randomness: with the same seed the same request gives the same output",
    "logprobs": "report log-probabilities of the chosen token and of this many of the likeliest tokens",
    "prompt_logprobs": "report those of the prompt's tokens, too",
    "num_beams": "search with so many beams for the likeliest text, as transformers' beam search does",
    "length_penalty": "beams: divide a text's log-probability by its length to this power; more favours longer texts",
    "early_stopping": "beams: end with as many texts as beams (true), where no better one is likely (false), or where "
    "none is possible (never)",
    "num_return_sequences": "beams: return this many of the best texts",
    "rule": "how proposals are accepted: rejection judges them together and accepts most; tokenwise judges them one by "
    "one; coupled gives one text per seed, whatever the draft, K, batch or engine",
    "lenience": "below 1, more is accepted and the output is lossy: a token may become 1 / lenience times as likely "
    "as the target says, and a greedy token may be only lenience times as likely as the best",
    "grammar": "the language that the output belongs to; as a flag, a file with a Lark grammar",
    "extra": "parameters of added filters, by name",
}


def help_for(*names: str) -> dict[str, str]:
    """Return the help of these parameters, which a filter reads."""
    return {name: HELP[name] for name in names}
