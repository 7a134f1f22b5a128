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
from .bodies import ChatBody, SomeTools, Tool

MOST_TOOLS_BYTES = 2**20  # of which the grammar of calls may hold a quarter


class Toolbox:
    """The tools of one chat, and which of them may be called.

    Where nothing is chosen the model calls some or none, if its template says how: without marks, none would be
    found in its text, so it answers in text.
    """

    def __init__(self, body: ChatBody, marks: tuple[str, str] | None) -> None:
        self.shown: list[dict[str, Any]] | None = None  # as chat templates know them
        self.required = False  # an answer is calls and no text
        self._tools: list[dict[str, Any]] = []  # that may be called
        self._choice: Any = None
        self._marks, self._several = marks, body.parallel_tool_calls is not False
        if body.tools is None:
            if body.tool_choice not in (None, "none"):
                raise RequestError("tool_choice is given, but there are no tools; send tools, too", "tool_choice")
            return
        if body.tool_choice == "none":
            return
        if (size := len(msgspec.json.encode(body.tools))) > MOST_TOOLS_BYTES:
            raise RequestError(f"tools has {size:,} bytes, expected at most {MOST_TOOLS_BYTES:,}; shorten it", "tools")
        self.shown = tools = [shown(tool) for tool in body.tools]
        choice: Any = body.tool_choice
        if isinstance(choice, SomeTools):
            allowed = [tool.function.name for tool in choice.allowed_tools.tools]
            tools = [_named(name, tools) for name in allowed]
            choice = choice.allowed_tools.mode
        elif choice is not None and not isinstance(choice, str):
            choice = msgspec.to_builtins(choice)
        if choice in (None, "auto") and marks is None:
            return
        self.required = choice not in (None, "auto")
        self._tools, self._choice = tools, choice

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Return what calls have to be, and what an `answer` instead of them; None if no calls are looked for."""
        if not self._tools:
            return answer
        try:
            return Grammar.from_tools(self._tools, self._choice, self._marks, self._several, answer)
        except RequestError as error:
            raise RequestError(str(error), "tool_choice") from error

    def reader(self) -> "Reader":
        """Make the reader of one answer."""
        names = [tool["function"]["name"] for tool in self._tools]
        if not names:
            return TextReader()
        return CallReader(names) if self._marks is None else MarkedReader(names, self._marks)


def shown(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates know it."""
    fields: dict[str, Any] = msgspec.to_builtins(tool)
    fields["function"].pop("strict", None)
    return fields


def _named(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = next((tool for tool in tools if tool["function"]["name"] == name), None)
    if found is None:
        names = [tool["function"]["name"] for tool in tools]
        raise RequestError(f"tool_choice allows {name!r}, expected some of the tools {names}", "tool_choice")
    return found


class Reader(Protocol):
    """Reads an answer piece by piece."""

    @property
    def calls(self) -> int:
        """How many have begun."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """Return what is new, in order; what may still become part of a mark is held back."""
        ...

    def end(self, whole: bool) -> list[Delta]:
        """Return what was held back, of an answer that is `whole` or was cut off."""
        ...


class TextReader:
    calls = 0

    def feed(self, text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []

    def end(self, whole: bool) -> list[Delta]:
        return []


class CallReader:
    """Reads {"name": …, "arguments": …}; the arguments are handed on as they are written."""

    def __init__(self, names: Sequence[str], index: int = 0) -> None:
        self.calls = 0
        self._names: Mapping[str, str] = {Grammar.opening_of_call(name): name for name in names}
        self._index, self._id = index, f"call_{secrets.token_hex(12)}"
        self._text = ""

    def feed(self, text: str) -> list[Delta]:
        """The last letter may be the brace after the arguments, and is held back."""
        self._text += text
        found = []
        if not self.calls:
            opening = next((one for one in self._names if self._text.startswith(one)), None)
            if opening is None:
                return []
            self.calls, self._text = 1, self._text[len(opening) :]
            name = FunctionDelta("", self._names[opening])
            found.append(CallDelta(name, self._index, id=self._id, type="function"))
        if len(self._text) > 1:
            found.append(CallDelta(FunctionDelta(self._text[:-1]), self._index))
            self._text = self._text[-1]
        return [Delta(tool_calls=found)] if found else []

    def end(self, whole: bool) -> list[Delta]:
        """The last brace of a call that is whole is not part of its arguments."""
        rest, self._text = "" if whole else self._text, ""
        return [Delta(tool_calls=[CallDelta(FunctionDelta(rest), self._index)])] if rest and self.calls else []


class MarkedReader:
    """Reads text in which calls are between marks. White space before a call is left out, and after the last."""

    def __init__(self, names: Sequence[str], marks: tuple[str, str]) -> None:
        self.calls = 0
        self._names = names
        self._before, self._after = f"{marks[0]}\n", f"\n{marks[1]}"
        self._call: CallReader | None = None  # that is being read
        self._ended_call = False  # and nothing has followed it
        self._text = ""

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        deltas: list[Delta] = []
        while True:
            mark = self._before if self._call is None else self._after
            ready, found, rest = self._text.partition(mark)
            if not found:
                break
            if self._call is None:
                deltas += self._pass_on(ready.rstrip())
                self._call = CallReader(self._names, self.calls)
                self.calls += 1
            else:
                deltas += [*self._pass_on(ready), *self._call.end(whole=True)]
                self._call, self._ended_call = None, True
            self._text = rest
        held = beginning_of(mark, self._text)
        ready = self._text[: len(self._text) - held]
        if self._call is None:
            ready = ready.rstrip()
        self._text = self._text[len(ready) :]
        return [*deltas, *self._pass_on(ready)]

    def end(self, whole: bool) -> list[Delta]:
        text, self._text = self._text, ""
        if self._call is not None:
            return self._call.end(whole=len(text) > 1)  # what was held back begins the mark, or is a line break of JSON
        return [] if self._ended_call and text.isspace() else self._pass_on(text)

    def _pass_on(self, text: str) -> list[Delta]:
        if self._call is not None:
            return self._call.feed(text)
        self._ended_call = self._ended_call and not text
        return [Delta(content=text)] if text else []


def beginning_of(mark: str, text: str) -> int:
    """Return how many letters at the end of a text may begin the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def joined(deltas: Iterable[Delta]) -> Delta:
    """One delta that says what all of them say, and of each call in one place: some clients read only the first."""
    each = list(deltas)
    content = "".join(one.content for one in each if one.content)
    reasoning = "".join(one.reasoning_content for one in each if one.reasoning_content)
    calls: dict[int, CallDelta] = {}
    for call in (call for one in each for call in one.tool_calls or ()):
        first = CallDelta(FunctionDelta("", call.function.name), call.index, call.id, call.type)
        calls.setdefault(call.index, first).function.arguments += call.function.arguments
    called = list(calls.values()) or UNSET
    return Delta(content=content or UNSET, reasoning_content=reasoning or UNSET, tool_calls=called)


def message_of(reader: Reader, text: str, whole: bool) -> ChatMessage:
    """Read all of an answer at once."""
    delta = joined([*reader.feed(text), *reader.end(whole)])
    if delta.tool_calls:
        calls = [ToolCall(one.id, one.function) for one in delta.tool_calls if one.id]
        message = ChatMessage(delta.content or None, tool_calls=calls)
    else:
        message = ChatMessage(text if delta.reasoning_content is UNSET else delta.content or "")
    message.reasoning_content = delta.reasoning_content
    return message


def arguments_of(text: str) -> Any:
    """The arguments of an earlier call as chat templates know them: an object, if they are one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
