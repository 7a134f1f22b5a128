"""Tools: a call is JSON that a grammar has confined, read into OpenAI's shape as it comes."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...engines import RequestError
from ...runtime import Grammar
from .answers import CallDelta, FunctionDelta, ToolCall
from .bodies import ChatBody, NamedTool

AUTO = (
    "tool_choice is auto, but how a model marks a call in free text is an affair of its chat template, which is not "
    "read; say required, none, or name a tool"
)


def tools_of(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools as chat templates know them."""
    if body.tools is None or body.tool_choice == "none":
        return None
    return [msgspec.to_builtins(tool) for tool in body.tools]


def grammar_of_call(body: ChatBody) -> Grammar | None:
    """The language of the calls that the answer may be; None if it is to be text."""
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise RequestError("tool_choice is given, but there are no tools; send tools, too", "tool_choice")
        return None
    if body.tool_choice in (None, "auto"):
        raise RequestError(AUTO, "tool_choice")
    if body.tool_choice != "none" and body.response_format is not None:
        raise RequestError("response_format and tool_choice both say what the answer is; send one", "response_format")
    choice = msgspec.to_builtins(body.tool_choice) if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    try:
        return Grammar.from_tools(msgspec.to_builtins(body.tools), choice)
    except RequestError as error:
        raise RequestError(str(error), "tool_choice") from error


class CallReader:
    """Reads {"name": …, "arguments": …} piece by piece; the arguments are handed on as they are written."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names: Mapping[str, str] = {Grammar.opening_of_call(name): name for name in names}
        self._id = f"call_{secrets.token_hex(12)}"
        self._text = ""
        self._begun = False

    def feed(self, text: str) -> list[CallDelta]:
        """Return what is new; the last letter may be the brace behind the arguments, and is held back."""
        self._text += text
        found = []
        if not self._begun:
            opening = next((one for one in self._names if self._text.startswith(one)), None)
            if opening is None:
                return []
            self._begun, self._text = True, self._text[len(opening) :]
            found.append(CallDelta(FunctionDelta("", self._names[opening]), id=self._id, type="function"))
        if len(self._text) > 1:
            found.append(CallDelta(FunctionDelta(self._text[:-1])))
            self._text = self._text[-1]
        return found

    def end(self, whole: bool) -> list[CallDelta]:
        """Return what was held back, but for the last brace of a call that is whole."""
        rest, self._text = "" if whole else self._text, ""
        return [CallDelta(FunctionDelta(rest))] if rest and self._begun else []

    def read(self, text: str, whole: bool) -> list[ToolCall]:
        """Read all of it at once."""
        deltas = [*self.feed(text), *self.end(whole)]
        arguments = "".join(one.function.arguments for one in deltas)
        return [ToolCall(self._id, FunctionDelta(arguments, one.function.name)) for one in deltas[:1]]


def arguments_of(text: str) -> Any:
    """The arguments of an earlier call as chat templates know them: an object, if they are one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
