"""Keep what was said before, which comes before the text of each window."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from ...engines import RequestError
from .fallback import WARM
from .tokens import WhisperTokens
from .transcript import Cut


class Context:
    """Begins with a prompt; if the text `goes_on`, it grows by what is heard, and its end comes before each window."""

    def __init__(self, tokens: WhisperTokens, prompt: Sequence[int], most: int, *, goes_on: bool) -> None:
        if tokens.before is None and (prompt or goes_on):
            raise RequestError(
                "the model has no token <|startofprev|>, after which it could read what was said before; leave it out",
                "prompt",
            )
        self._begin = [] if tokens.before is None else [tokens.before]
        self._prompt, self._most = [*prompt], most
        self._said = [*prompt] if prompt else None  # nothing yet
        self._asked = self._goes_on = goes_on

    def before(self) -> list[int]:
        """Return the tokens before the next window's own."""
        if self._goes_on and self._said is not None:
            return [*self._begin, *self._said[-self._most :]]
        return [*self._begin, *self._prompt] if self._prompt else []

    def add(self, found: Sequence[Cut], temperature: float) -> None:
        """Add what was heard. A warm text is no context for the next."""
        if found:
            self._said = [*(self._said or ()), *(token for one in found for token in one.tokens)]
        self._goes_on = self._asked and temperature < WARM


def read_prompt(prompt: str | Sequence[int], tokens: WhisperTokens, tokenizer: Tokenizer, most: int) -> list[int]:
    """Return the tokens of a prompt: the last ones of a text, or all that are given."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False).ids if prompt.strip() else []
        if special := [token for token in ids if token >= tokens.end]:
            raise RequestError(
                f"the prompt has the special token {tokenizer.id_to_token(special[0])}, expected plain text", "prompt"
            )
        return ids[-most:]
    ids = [*prompt]
    return ids[1:] if ids[:1] == [tokens.before] else ids
