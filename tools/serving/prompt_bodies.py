"""Bodies that turn text or messages into token ids, messages into a prompt, and ids into text."""

from typing import Annotated

from msgspec import Meta

from .bodies import MOST_TOOLS, Closed, Message, Settings, SomeParts, TokenId, Tool


class TokenizeBody(Closed, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], SomeParts] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ApplyTemplateBody(Closed, kw_only=True):
    model: str | None = None
    messages: Annotated[list[Message], SomeParts]
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=MOST_TOOLS)] | None = None
    chat_template_kwargs: Settings | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(Closed, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
