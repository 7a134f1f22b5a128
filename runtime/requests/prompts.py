"""Turns prompts into token ids. It needs no torch, so that those of flags are refused before that is loaded."""

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from ...engines import Bundle, BundleError, RequestError
from ...engines.errors import counted
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


def several(
    prompts: Any, params: Any, sources: Sequence[Any] | None, images: Sequence[Any] | None
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Return a prompt for each request, and its parameters, source and images; refuse what is not one for each."""
    prompts = [()] * len(sources) if sources is not None and len(prompts) == 0 else _several(prompts)
    count = len(prompts)
    sources = [None] * count if sources is None else sources
    if len(sources) != count:
        raise RequestError(f"{counted(len(sources), 'source')} for {counted(count, 'prompt')}, expected one each")
    images = [()] * count if images is None else images
    if len(images) != count:
        raise RequestError(f"images for {len(images)} of {counted(count, 'prompt')}, expected a list for each")
    params = params if isinstance(params, Sequence) else [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} SamplingParams for {counted(count, 'prompt')}, expected one each")
    return zip(prompts, params, sources, images, strict=True)


def _several(prompts: Any) -> Sequence[Any]:
    """Wrap a single prompt, text or token ids, in a list; leave several as they are."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"the prompts are {prompts!r}, expected text, a list of token ids, or a list of prompts")
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], int) else prompts
