"""POST /v1/chat/completions: the bundle's chat template turns messages into a prompt, and the model answers."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...runtime import Output, Piece, Request
from ...runtime.images.picture import Picture
from .access_log import note_prompt
from .answers import ChatChoice, ChunkChoice, Delta, FinishReason, InputTokens, Prompt
from .bodies import ChatBody, ImagePart, Message, TextPart
from .choices import ChoiceWriter, reason_of
from .delivery import delivery_of, encode, json_response
from .errors import ApiError
from .formats import RequestedGrammar, format_of
from .guard import caller_of
from .images import images_in
from .prompt_bodies import ApplyTemplateBody
from .raw_bodies import body_of
from .reasoning import ReasoningReader, has_begun
from .service import Service
from .templates import ChatTemplate, Ending
from .tickets import RequestGroup
from .tokens import chat_logprobs
from .tool_calls import Reader, Toolbox, arguments_of, joined, message_of, shown

END_TOKENS = 16  # of a prompt, in which the mark of reasoning may be
NO_TEMPLATE = (
    "this bundle has no chat template, so messages cannot become a prompt; send a prompt to /v1/completions, or start "
    "the server with --chat-template FILE"
)


class ChatWriter(ChoiceWriter[ChatChoice, ChunkChoice]):
    """Writes chat completions."""

    def __init__(self, service: Service, body: ChatBody, conversation: "Conversation") -> None:
        super().__init__(service, body, "chatcmpl", "chat.completion", "chat.completion.chunk")
        self._body: ChatBody = body
        self._readers: defaultdict[int, Reader] = defaultdict(conversation.reader)  # of each choice
        self._prompt = conversation.read if body.return_token_ids else UNSET

    def choice(self, index: int, output: Output) -> ChatChoice:
        message = message_of(self._readers[index], output.text, output.finish_reason == "stop")
        choice = ChatChoice(index=index, message=message, finish_reason=self._reason(index, output))
        if output.logprobs is not None:
            choice.logprobs = chat_logprobs(output.logprobs, self._spelling)
        if self._body.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = self._prompt, list(output.token_ids)
        return choice

    def first(self, index: int, request: Request) -> ChunkChoice:
        return ChunkChoice(index=index, delta=Delta(role="assistant", content=""), prompt_token_ids=self._prompt)

    def next(self, index: int, pieces: Sequence[Piece], request: Request) -> ChunkChoice | None:
        text = "".join(piece.text for piece in pieces)
        logprobs = [one for piece in pieces for one in piece.logprobs]
        if not (text or logprobs or self._body.return_token_ids):
            return None
        delta = joined(self._readers[index].feed(text))
        if delta == Delta() and not (logprobs or self._body.return_token_ids):  # what came is not whole yet, or marks
            return None
        choice = ChunkChoice(index=index, delta=delta)
        if self._body.logprobs:
            choice.logprobs = chat_logprobs(logprobs, self._spelling)
        if self._body.return_token_ids:
            choice.token_ids = [token for piece in pieces for token in piece.token_ids]
        return choice

    def last(self, index: int, output: Output) -> ChunkChoice:
        rest = joined(self._readers[index].end(output.finish_reason == "stop"))
        return ChunkChoice(index=index, delta=rest, finish_reason=self._reason(index, output))

    def _reason(self, index: int, output: Output) -> FinishReason:
        reason = reason_of(output)
        return "tool_calls" if self._readers[index].calls and reason == "stop" else reason


class Conversation(NamedTuple):
    """Messages as the model reads them, what its answers have to be, and how they are read."""

    prompt: list[int]  # with a placeholder for each picture
    asked: RequestedGrammar | None
    reader: Callable[[], Reader]
    pictures: Sequence[Picture]
    read: list[int]  # the prompt with the tokens of pictures in their places


async def chat(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    body = await body_of(request, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs says how many log-probabilities, but logprobs is not true", "top_logprobs")
    group, conversation = await converse(request, service, body)
    return delivery_of(group, ChatWriter(service, body, conversation), service, stream=body.stream, each=body.n or 1)


async def count_chat(request: HttpRequest) -> Response:
    """Count what the model would read, as llama.cpp does at this path."""
    service: Service = request.app.state.service
    body = await body_of(request, ChatBody)
    service.require_model(body.model)
    return json_response(InputTokens(len((await conversation_of(service, body, service.most_counted)).read)))


async def converse(request: HttpRequest, service: Service, body: ChatBody) -> tuple[RequestGroup, Conversation]:
    """Let the model answer messages, whatever API they came by."""
    service.require_model(body.model)
    service.stepper.refuse_if_full(body.n or 1)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens mean the same; send one", "max_tokens")
    note_prompt(request.scope, [plain(message)["content"] for message in body.messages])
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if body.truncate_prompt_tokens is not None and images_in(body.messages):
        raise ApiError(400, "truncate_prompt_tokens could cut an image in two; leave it out", "truncate_prompt_tokens")
    conversation = await conversation_of(service, body, service.most_of(body))
    conversation = conversation._replace(prompt=service.truncated(conversation.prompt, body, max_tokens))
    wanted = await service.submissions(
        body,
        [conversation.prompt],
        max_tokens,
        caller_of(request),
        conversation.asked,
        pictures=conversation.pictures,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return service.stepper.submit(wanted, every_round=bool(body.stream)), conversation


async def conversation_of(service: Service, body: ChatBody, most: int) -> Conversation:
    tools = Toolbox(body, None if service.template is None else service.template.call_marks)
    asked = format_of(body, tools)
    settings = (body.chat_template_kwargs or {}) | {"tools": tools.shown}
    if body.reasoning_effort is not None:
        settings["reasoning_effort"] = body.reasoning_effort
    prompt, seen = await prompt_of(service, body.messages, settings, most, ending_of(body))
    read = service.images.expanded(prompt, seen)
    if (marks := service.reasoning) is None:
        return Conversation(prompt, asked, tools.reader, seen, read)
    begun = has_begun(service.decoder.tokenizer.decode(prompt[-END_TOKENS:], skip_special_tokens=False), marks)
    if asked is not None:
        asked = RequestedGrammar(asked.field, asked.grammar.after_reasoning(marks, begun))
    return Conversation(prompt, asked, lambda: ReasoningReader(tools.reader(), marks, begun), seen, read)


def ending_of(body: ChatBody | ApplyTemplateBody) -> Ending:
    if not body.continue_final_message:
        return Ending.NOTHING if body.add_generation_prompt is False else Ending.ANSWER
    if body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message goes on with the last message, but add_generation_prompt begins another; send one",
            "continue_final_message",
        )
    if not body.messages[-1].content:
        raise ApiError(400, "the last message has no text to be continued; say something", "continue_final_message")
    return Ending.CONTINUED


async def prompt_of(
    service: Service,
    messages: Sequence[Message],
    settings: Mapping[str, object],
    most: int,
    ending: Ending = Ending.ANSWER,
) -> tuple[list[int], list[Picture]]:
    """The token ids of a conversation, ready for the assistant's answer, and a picture for each placeholder in them."""
    template, each = template_of(service, messages, most)  # refuses before an image is fetched or read
    pictures = await service.images.pictures(images_in(messages))
    size = len(encode([each, settings]))
    ids = await service.aside(partial(template.encode, each, settings, ending, most, pictures), size)
    if not ids:
        raise ApiError(400, "the chat template makes an empty prompt of these messages; say something", "messages")
    return ids, pictures


def template_of(
    service: Service, messages: Sequence[Message], most: int
) -> tuple[ChatTemplate, list[dict[str, object]]]:
    """The template, and the messages as it knows them."""
    if service.template is None:
        raise ApiError(400, NO_TEMPLATE, "messages", "no_chat_template")
    each = [plain(message) for message in messages]
    characters = sum(len(str(message["content"])) for message in each)
    service.longest.require(characters, most, "messages")
    return service.template, each


async def apply_template(request: HttpRequest) -> Response:
    """Show the prompt that messages become, with a placeholder for each image."""
    service: Service = request.app.state.service
    body = await body_of(request, ApplyTemplateBody)
    service.require_model(body.model)
    template, each = template_of(service, body.messages, service.most_counted)
    tools = None if body.tools is None else list(map(shown, body.tools))
    settings = (body.chat_template_kwargs or {}) | {"tools": tools}
    pictures = await service.images.pictures(images_in(body.messages))
    write = partial(template.write, each, settings, ending_of(body), pictures)
    text = await service.aside(write, len(encode(body)))
    return json_response(Prompt(text))


def plain(message: Message) -> dict[str, object]:
    """A message as templates know it: its content is one text, or parts of which some are images."""
    content: object = message.content
    if isinstance(message.content, list):
        parts = [_part(part) for part in message.content]
        seen = any(part["type"] == "image" for part in parts)
        content = parts if seen else "\n".join(part["text"] for part in parts)
    fields: dict[str, object] = {"role": message.role, "content": content or message.refusal or ""}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "reasoning_content", "tool_call_id", "is_error"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    return fields


def _part(part: TextPart | ImagePart) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
