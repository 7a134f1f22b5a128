"""What a bundle's manifest rules out of a request. No torch here, so that flags are refused before that is loaded."""

from ...engines import Bundle, RequestError
from ...engines.errors import counted
from ..acceptance.parameter_fields import ParameterFields


def refuse_source(bundle: Bundle, given: bool) -> None:
    """Refuse a source that no model reads, and the lack of one."""
    if bundle.encoders and not given:
        raise RequestError(f"the target of bundle {bundle.path} needs a source; give one", "source")
    if given and not bundle.encoders:
        raise RequestError(
            f"the target of bundle {bundle.path} has no encoder that could read a source; leave it out", "source"
        )


def refuse_images(bundle: Bundle) -> None:
    """Refuse images that no graph of the bundle sees."""
    if bundle.vision is None:
        raise RequestError(
            f"the target of bundle {bundle.path} reads no images; leave them out, or export it with --images", "images"
        )


def refuse_long(bundle: Bundle, max_new_tokens: int, prompt_tokens: int | None = None) -> None:
    """Refuse what is longer than the bundle allows; a prompt that is not tokenised yet has at least one token."""
    over = (prompt_tokens or 1) + max_new_tokens - bundle.max_length
    if over <= 0:
        return
    limit = f"max_new_tokens {max_new_tokens} exceed the bundle's limit of {bundle.max_length} by"
    if prompt_tokens is None:
        raise RequestError(f"any prompt and {limit} at least {over}; lower max_new_tokens")
    raise RequestError(f"prompt of {counted(prompt_tokens, 'token')} and {limit} {over}; shorten either")


def refuse_foreign_tokens(bundle: Bundle, params: ParameterFields) -> None:
    """Refuse parameters that name tokens which the vocabulary does not have."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        for token in getattr(params, name):
            require_token(token, bundle.tokenizer.vocab_size, name)


def require_token(token: object, vocab_size: int, where: str) -> None:
    if type(token) is not int or not 0 <= token < vocab_size:
        raise RequestError(f"{where} token id {token!r} is outside the vocabulary of {vocab_size} tokens", where)
