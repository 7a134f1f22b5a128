"""Tools: calls are JSON that a grammar has confined, read into OpenAI's shape as they come."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from ...engines import RequestError
from ...runtime import Grammar
from .answers import CallDelta, ChatMessage, Delta, FunctionDelta, ToolCall
from .bodies import ChatBody, NamedTool
from .templates import CALL_MARKS

AUTO = (
    f"tool_choice is auto, but this chat template does not tell the model to write calls between {CALL_MARKS[0]} and "
    f"{CALL_MARKS[1]}, so none would be found in its text; say required, none, or name a tool"
)


def tools_of(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools as chat templates know them."""
    if body.tools is None or body.tool_choice == "none":
        return None
    return [msgspec.to_builtins(tool) for tool in body.tools]


def grammar_of_call(body: ChatBody, marks: tuple[str, str] | None) -> Grammar | None:
    """The language of answers that are or may hold calls; None if the answer is to be text."""
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise RequestError("tool_choice is given, but there are no tools; send tools, too", "tool_choice")
        return None
    if body.tool_choice in (None, "auto") and marks is None:
        raise RequestError(AUTO, "tool_choice")
    if body.tool_choice != "none" and body.response_format is not None:
        raise RequestError("response_format and tool_choice both say what the answer is; send one", "response_format")
    choice = msgspec.to_builtins(body.tool_choice) if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    several = body.parallel_tool_calls is not False
    try:
        return Grammar.from_tools(msgspec.to_builtins(body.tools), choice, marks, several)
    except RequestError as error:
        raise RequestError(str(error), "tool_choice") from error


def reader_of(body: ChatBody, marks: tuple[str, str] | None) -> "Reader":
    """Make the reader of one answer to this body."""
    names = [tool.function.name for tool in body.tools or ()]
    if not names or body.tool_choice == "none":
        return TextReader()
    return CallReader(names) if marks is None else MarkedReader(names, marks)


class Reader(Protocol):
    """Reads an answer piece by piece."""

    calls: int  # how many have begun

    def feed(self, text: str) -> Delta:
        """Return what is new; what may still become part of a mark is held back."""
        ...

    def end(self, whole: bool) -> Delta:
        """Return what was held back, of an answer that is `whole` or was cut off."""
        ...


class TextReader:
    calls = 0

    def feed(self, text: str) -> Delta:
        return Delta(content=text)

    def end(self, whole: bool) -> Delta:
        return Delta()


class CallReader:
    """Reads {"name": …, "arguments": …}; the arguments are handed on as they are written."""

    def __init__(self, names: Sequence[str], index: int = 0) -> None:
        self.calls = 0
        self._names: Mapping[str, str] = {Grammar.opening_of_call(name): name for name in names}
        self._index, self._id = index, f"call_{secrets.token_hex(12)}"
        self._text = ""

    def feed(self, text: str) -> Delta:
        """The last letter may be the brace behind the arguments, and is held back."""
        self._text += text
        found = []
        if not self.calls:
            opening = next((one for one in self._names if self._text.startswith(one)), None)
            if opening is None:
                return Delta()
            self.calls, self._text = 1, self._text[len(opening) :]
            name = FunctionDelta("", self._names[opening])
            found.append(CallDelta(name, self._index, id=self._id, type="function"))
        if len(self._text) > 1:
            found.append(CallDelta(FunctionDelta(self._text[:-1]), self._index))
            self._text = self._text[-1]
        return Delta(tool_calls=found or UNSET)

    def end(self, whole: bool) -> Delta:
        """The last brace of a call that is whole is not part of its arguments."""
        rest, self._text = "" if whole else self._text, ""
        return Delta(tool_calls=[CallDelta(FunctionDelta(rest), self._index)] if rest and self.calls else UNSET)


class MarkedReader:
    """Reads text in which calls stand between marks. White space before a call is left out, and after the last."""

    def __init__(self, names: Sequence[str], marks: tuple[str, str]) -> None:
        self.calls = 0
        self._names = names
        self._before, self._after = f"{marks[0]}\n", f"\n{marks[1]}"
        self._call: CallReader | None = None  # that is being read
        self._ended_call = False  # and nothing has followed it
        self._text = ""

    def feed(self, text: str) -> Delta:
        self._text += text
        deltas: list[Delta] = []
        while True:
            mark = self._before if self._call is None else self._after
            ready, found, rest = self._text.partition(mark)
            if not found:
                break
            if self._call is None:
                deltas.append(self._pass_on(ready.rstrip()))
                self._call = CallReader(self._names, self.calls)
                self.calls += 1
            else:
                deltas += [self._pass_on(ready), self._call.end(whole=True)]
                self._call, self._ended_call = None, True
            self._text = rest
        held = beginning_of(mark, self._text)
        ready = self._text[: len(self._text) - held]
        if self._call is None:
            ready = ready.rstrip()
        self._text = self._text[len(ready) :]
        return joined([*deltas, self._pass_on(ready)])

    def end(self, whole: bool) -> Delta:
        text, self._text = self._text, ""
        if self._call is not None:
            return self._call.end(whole=len(text) > 1)  # what was held back begins the mark, or is a line break of JSON
        return Delta() if self._ended_call and text.isspace() else self._pass_on(text)

    def _pass_on(self, text: str) -> Delta:
        if self._call is not None:
            return self._call.feed(text)
        self._ended_call = self._ended_call and not text
        return Delta(content=text or UNSET)


def beginning_of(mark: str, text: str) -> int:
    """Return how many letters at the end of a text may begin the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def joined(deltas: Iterable[Delta]) -> Delta:
    """One delta that says what all of them say."""
    content = "".join(one.content for one in deltas if one.content)
    calls = [call for one in deltas for call in one.tool_calls or ()]
    return Delta(content=content or UNSET, tool_calls=calls or UNSET)


def message_of(reader: Reader, text: str, whole: bool) -> ChatMessage:
    """Read all of an answer at once."""
    delta = joined([reader.feed(text), reader.end(whole)])
    calls: dict[int, ToolCall] = {}
    for one in delta.tool_calls or ():
        if one.id:
            calls[one.index] = ToolCall(one.id, FunctionDelta("", one.function.name))
        calls[one.index].function.arguments += one.function.arguments
    if not calls:
        return ChatMessage(text)
    return ChatMessage(delta.content or None, tool_calls=list(calls.values()))


def arguments_of(text: str) -> Any:
    """The arguments of an earlier call as chat templates know them: an object, if they are one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
