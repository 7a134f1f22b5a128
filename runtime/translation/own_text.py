"""The text of one request in the tokens of a draft that has its own, beside the same text in the target's."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from .growing import GrowingTokens
from .translation import Translation

CONTEXT = 8  # tokens that a decoder sees before those whose text is asked for
OF_A_CHARACTER = 8  # tokens that may be a part of one; more will never be a character
BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet


class OwnText:
    """Follows what the target has read and said. The end may be bytes of a character that is not whole yet."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._ours, self._own = GrowingTokens(translation.target), GrowingTokens(translation.own)
        self.read = 0  # tokens of the target
        self.ids: list[int] = []  # the draft's
        self._context: list[int] = []  # the last tokens of the target that are text
        self._unread: list[int] = []  # and those whose text has not come out yet

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Read what is new since the last call."""
        roles, begun = self._translation.roles, self.read
        new = [*prompt[begun:], *output[max(0, begun - len(prompt)) :]]
        if not begun and new and new[0] not in roles:
            for token in self._translation.opening:
                self._own.put(token)
        self.read += len(new)
        for token in new:
            if token in roles:
                self._come_out(everything=True)
                self._ours.put(token)
                self._own.put(roles[token])
                self._context = []
            else:
                self._unread.append(token)
        self._come_out()
        if new:
            self.ids = self._own.ids

    @property
    def whole(self) -> bool:
        """Whether the draft can read all of the text."""
        return not self._unread

    def said(self, drafted: Sequence[int]) -> list[int]:
        """Return the target's tokens for what the draft says next in its own."""
        ends = (place for place, token in enumerate(drafted) if token in self._translation.special)
        end = next(ends, len(drafted))
        tokens = self._ours.following(text_after(self._translation.own, self.ids[-CONTEXT:], drafted[:end]))
        meant = [ours for ours, own in self._translation.roles.items() if own in drafted[end : end + 1]]
        return [*tokens, *meant[:1]]

    def _come_out(self, everything: bool = False) -> None:
        """Take the text of all tokens but those at the end that are a part of a character."""
        if not self._unread:
            return
        decode = self._translation.target.decode
        for end in range(len(self._unread), max(0, len(self._unread) - OF_A_CHARACTER), -1):
            tokens = self._unread[:end]
            if everything or not decode(self._context + tokens, skip_special_tokens=False).endswith(BROKEN):
                break
        else:
            if len(self._unread) < OF_A_CHARACTER:
                return
            tokens = self._unread
        text = text_after(self._translation.target, self._context, tokens)
        self._context = [*self._context, *tokens][-CONTEXT:]
        del self._unread[: len(tokens)]
        self._ours.append(text)
        self._own.append(text)


def text_after(tokenizer: Tokenizer, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of tokens that follow others, without bytes at its end that are no character yet."""
    before, both = (tokenizer.decode([*each], skip_special_tokens=False) for each in (context, [*context, *tokens]))
    return str(both[len(before) :]).rstrip(BROKEN)
