"""Turns prompts into token ids. It needs no torch, so that those of flags are refused before that is loaded."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from ...engines import Bundle, BundleError, RequestError
from .bounds import require_token

Prompt = str | Sequence[int]


def read_tokenizer(bundle: Bundle) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(bundle.tokenizer_file))
    except Exception as error:  # the library raises plain Exceptions
        raise BundleError(f"{bundle.tokenizer_file} is not a tokenizer ({error}); export the bundle again") from error


def encode(prompt: object, tokenizer: Tokenizer, vocab_size: int, begins: bool = True) -> list[int]:
    """Tokenise text; where it `begins` a sequence the tokenizer may put a token before it."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode ({error}); clean it first") from error
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=begins).ids
    elif isinstance(prompt, Sequence):
        ids = list(prompt)
    else:
        raise RequestError(f"the prompt is {prompt!r}, expected text or a list of token ids")
    if not ids:
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    for token in ids:
        require_token(token, vocab_size, "prompt")
    return ids
