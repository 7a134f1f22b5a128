"""Chat templates without transformers: messages become a prompt, and special tokens in what users say stay text.

The template comes with the bundle or from whoever starts the server, never with a request.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from ...engines import EngineError, RequestError
from ...engines.bundle import TokenizerEntry
from ...engines.errors import counted
from .sandbox import SafeTemplate
from .tokenising import encoded

if TYPE_CHECKING:
    from ...runtime.images.picture import Picture
    from ...runtime.images.reader import ImageReader

CALL_MARKS = ("<tool_call>", "</tool_call>")  # lines around a call, as the templates of Hermes, Qwen and others say
MARKED_JSON = '{"name": <function-name>, "arguments": <'  # what such templates tell a model to write between them
PROBE = "trt-spec"  # a text to see whether a template writes it
MARKS = "\U0010fffd\U0010fffc"  # characters that mean nothing and occur nowhere; a tokenizer is kept for each


class Ending(Enum):
    """The end of a prompt, after its last message."""

    ANSWER = "the beginning of an answer"
    NOTHING = "nothing"
    CONTINUED = "not even the end of that message, which is to go on"


class ChatTemplate:
    """One template and the tokenizer that reads what it writes."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, entry: TokenizerEntry, images: "ImageReader | None" = None
    ) -> None:
        self._tokenizer, self._images = tokenizer, images
        self._knows_developer = "developer" in source
        ids = {"bos_token": entry.bos_token_id, "eos_token": next(iter(entry.eos_token_ids), None)}
        self._tokens = {name: tokenizer.id_to_token(token) for name, token in ids.items() if token is not None}
        self._template = SafeTemplate(source)
        spec = json.loads(tokenizer.to_str())
        if images is not None:
            for one in spec["added_tokens"]:
                one["special"] |= one["content"] == images.placeholder  # which no user may spell, either
        self.special = [one["content"] for one in spec["added_tokens"] if one["special"] and one["content"]]
        longest_first = sorted(self.special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._spec = spec
        self._marked: dict[str, tuple[Tokenizer, dict[int, int]]] = {}  # by mark
        marked = CALL_MARKS[0] in source and MARKED_JSON in source.replace("\\", "")
        # What marks a call, if the template says so to the model and the marks can be seen in its text.
        self.call_marks = CALL_MARKS if marked and not set(CALL_MARKS).intersection(self.special) else None
        self._in_parts = False
        self._in_parts = images is not None and not self._shows(PROBE) and self._shows([part_of_text(PROBE)])

    def _shows(self, content: object) -> bool:
        """Whether a message of this content is written. Templates that know images may write parts alone."""
        try:
            return PROBE in self.render([{"role": "user", "content": content}])
        except (RequestError, EngineError):
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        ending: Ending = Ending.ANSWER,
    ) -> str:
        """Write messages as the template has them, and end them as asked."""
        said = [
            {**message, "role": "system"} if message["role"] == "developer" and not self._knows_developer else message
            for message in messages
        ]
        end = ""
        if ending is Ending.CONTINUED:
            end = _unused(_texts([messages, settings or {}]))
            said[-1] = {**said[-1], "content": _followed(said[-1]["content"], end)}
        if self._in_parts:
            said = [
                {**one, "content": [part_of_text(one["content"])]} if isinstance(one["content"], str) else one
                for one in said
            ]
        context = {"tools": None, "documents": None, **self._tokens, **(settings or {})}
        context |= {"messages": said, "add_generation_prompt": ending is Ending.ANSWER}
        text = self._template.write(context)
        if not end:
            return text
        before, found, _ = text.rpartition(end)
        if not found:
            raise RequestError(
                "the chat template does not write out the last message, so it cannot be continued; send "
                "continue_final_message false",
                "continue_final_message",
            )
        return before

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        ending: Ending = Ending.ANSWER,
        most: int | None = None,
        pictures: "Sequence[Picture]" = (),
    ) -> list[int]:
        """Return the prompt's tokens, at `most` so many. A special token that a user spells out stays text.

        Each image has a placeholder there, and beside it what is written for its picture.
        """
        ids = self._encode(messages, settings, ending, most, pictures)
        if self._images is not None:
            wanted = sum(part.get("type") == "image" for one in messages for part in _parts_of(one["content"]))
            if (places := ids.count(self._images.image_token)) != wanted:
                raise RequestError(
                    f"the chat template writes {counted(places, 'place')} for {counted(wanted, 'image')}; give one "
                    "that knows images by --chat-template",
                    "messages",
                )
        return ids

    def _encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None,
        ending: Ending,
        most: int | None,
        pictures: "Sequence[Picture]",
    ) -> list[int]:
        text, mark = self._written(messages, settings, ending, pictures)
        if mark is None:
            return encoded(self._tokenizer, text, False, most, "messages")
        # The template's own special tokens get the mark, the users' lose it; then one tokenizer reads all of it.
        text = self._any_special.sub(lambda found: mark + mark + found[0], text)
        text = re.sub(f"{mark}{mark}|{mark}", lambda found: mark if len(found[0]) == 2 else "", text)
        return self._encode_marked(text, mark, most)

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        ending: Ending = Ending.ANSWER,
        pictures: "Sequence[Picture]" = (),
    ) -> str:
        """Return the text that `encode` reads."""
        text, mark = self._written(messages, settings, ending, pictures)
        return text if mark is None else text.replace(mark, "")

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None,
        ending: Ending,
        pictures: "Sequence[Picture]",
    ) -> tuple[str, str | None]:
        """Return the text, and the mark that breaks special tokens which users spell out, if there are any."""
        given = [messages, settings or {}]
        written = str if self._images is None else partial(self._images.surrounded, pictures=pictures)
        if not any(self._any_special.search(text) for text in _texts(given)):
            return written(self.render(messages, settings, ending)), None
        mark = _unused(_texts([*given, self.special]))

        def broken(found: re.Match[str]) -> str:  # it is none for the template, and its ends are as they were
            return found[0][0] + mark + found[0][1:]

        messages, settings = (_changed(one, self._any_special, broken) for one in given)
        return written(self.render(messages, settings, ending)), mark

    def _encode_marked(self, text: str, mark: str, most: int | None) -> list[int]:
        """Encode a text in which the special tokens, and nothing else, follow a mark."""
        if mark not in self._marked:
            self._marked[mark] = self._marking(mark)
        marked, renumbered = self._marked[mark]
        ids = [renumbered.get(token, token) for token in encoded(marked, text, False, most, "messages")]
        special = {one["id"] for one in self._spec["added_tokens"] if one["special"]}
        if sum(token in special for token in ids) != text.count(mark):
            raise RequestError(
                "the messages spell out a special token that this tokenizer cannot read as text; leave it out",
                "messages",
            )
        return ids

    def _marking(self, mark: str) -> tuple[Tokenizer, dict[int, int]]:
        """Make a tokenizer that knows special tokens after a mark alone; say which numbers stand for which."""
        own = self._spec["added_tokens"]
        added = [one | {"content": mark + one["content"]} if one["special"] else one for one in own]
        marked = Tokenizer.from_str(json.dumps(self._spec | {"added_tokens": added, "post_processor": None}))
        numbers = marked.get_vocab(with_added_tokens=True)
        return marked, {numbers[new["content"]]: old["id"] for new, old in zip(added, own, strict=True)}


def part_of_text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _parts_of(content: object) -> Sequence[Mapping[str, Any]]:
    return content if isinstance(content, list) else ()


def _followed(content: Any, end: str) -> Any:
    """Return what a message says, with more text at its end."""
    return content + end if isinstance(content, str) else [*content, part_of_text(end)]


def _unused(texts: Iterable[str]) -> str:
    """Return one of the marks that is in none of the texts."""
    everything = "".join(texts)
    found = next((mark for mark in MARKS if mark not in everything), None)
    if found is None:
        raise RequestError(
            "the messages have U+10FFFD and U+10FFFC, which mean nothing and serve as marks here; leave one out",
            "messages",
        )
    return found


def _texts(value: Any) -> Iterator[str]:
    """All text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


def _changed(value: Any, pattern: re.Pattern[str], change: Any) -> Any:
    """The same JSON value with a change to what is found in its text."""
    if isinstance(value, str):
        return pattern.sub(change, value)
    if isinstance(value, Mapping):
        return {pattern.sub(change, key): _changed(part, pattern, change) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_changed(part, pattern, change) for part in value]
    return value
