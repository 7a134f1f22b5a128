"""Tells what a model reasons from what it answers, by the marks around its reasoning."""

from .answers import Delta
from .marks import Marks
from .tool_calls import Reader, beginning_of


def has_begun(prompt: str, marks: Marks) -> bool:
    """Whether a prompt ends in the middle of reasoning, as templates make them that have the model reason always."""
    return prompt.rstrip().endswith(marks[0])


class ReasoningReader:
    """Reads reasoning, and hands what follows it on to another reader. White space after the marks is left out."""

    def __init__(self, answer: Reader, marks: Marks, begun: bool) -> None:
        self._answer, self._marks = answer, marks
        self._mark: str | None = marks[1] if begun else marks[0]  # that is looked for; None: the answer has begun
        self._fresh = True  # nothing but white space has come since the last mark
        self._text = ""

    @property
    def calls(self) -> int:
        return self._answer.calls

    def feed(self, text: str) -> list[Delta]:
        deltas = []
        self._text += text
        before, after = self._marks
        if self._mark == before:
            begins = self._text.lstrip()
            if before.startswith(begins):
                return []
            if begins.startswith(before):
                self._mark, self._text = after, begins[len(before) :]
            else:
                self._mark, self._fresh = None, False
        if self._mark == after:
            if self._fresh:
                self._text = self._text.lstrip()
                self._fresh = not self._text
            reasoning, ended, rest = self._text.partition(after)
            if not ended:
                held = beginning_of(after, self._text)
                reasoning, rest = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
            if reasoning:
                deltas.append(Delta(reasoning_content=reasoning))
            self._text = rest
            if ended:
                self._mark, self._fresh = None, True
        if self._mark is None:
            text = self._text.lstrip() if self._fresh else self._text
            self._fresh, self._text = self._fresh and not text, ""
            deltas += self._answer.feed(text)
        return deltas

    def end(self, whole: bool) -> list[Delta]:
        """A text that ends before its answer is all reasoning, or an answer if no reasoning has begun."""
        text, self._text = self._text, ""
        if self._mark == self._marks[1]:
            return [Delta(reasoning_content=text)] if text else []
        return [*self._answer.feed(text), *self._answer.end(whole)]
