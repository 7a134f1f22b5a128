"""A page of one output that colours each token by the model that wrote it, and tells of its round, p and q."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ...runtime import Output, TracedRound, TracedSibling
from ..in_words import draft_of, length_of_drafts, source_of_proposals, summary
from ..trace_lines import shown
from .page import page

if TYPE_CHECKING:
    from ...runtime import Decoder, Request

STYLE = """
.key { display: flex; flex-wrap: wrap; gap: .5rem 1.25rem; margin: 1rem 0; font-size: .9rem; }
.text { padding: 1rem; border: 1px solid var(--line); border-radius: .5rem; white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: isolate; font: .95rem/1.8 ui-monospace, monospace; }
.prompt { color: var(--muted); }
.draft, .target { padding: .1em 0; border-bottom: 2px solid; border-radius: 2px; cursor: default; }
.draft { border-color: var(--green); background: color-mix(in srgb, var(--green) 18%, transparent); }
.target { border-color: var(--blue); background: color-mix(in srgb, var(--blue) 18%, transparent); }
.key span { padding: .1em .4em; }
[data-mark]::before { content: attr(data-mark); color: var(--muted); }
:has(#rejected:checked) [data-rejected]::before { content: attr(data-rejected); color: var(--orange);
  text-decoration: line-through; margin-right: .2em; }
[data-tip]:hover, [data-tip]:focus { outline: 2px solid var(--ink); outline-offset: 1px; }
[data-tip]:hover::after, [data-tip]:focus::after { content: attr(data-tip); position: fixed; z-index: 1; left: 0;
  right: 0; bottom: 0; padding: .75rem 1.5rem; background: var(--ink); color: var(--paper);
  font: .9rem/1.5 system-ui, sans-serif; white-space: pre-wrap; }
body:has([data-tip]:hover) [data-tip]:focus:not(:hover)::after { content: none; }
body { padding-bottom: 9rem; }
"""


@dataclass(frozen=True)
class Written:
    """One token of an output."""

    text: str  # what it added; nothing where a later token completes its character
    token: int
    number: int  # of its round, from 1
    round: TracedRound
    position: int  # in its round

    @property
    def from_draft(self) -> bool:
        return self.position < self.round.accepted

    @property
    def rejected(self) -> int | None:
        """The rejected proposal that this token replaces."""
        proposal = self.round.proposal
        unjudged = any(one.stands for one in self.round.siblings) or self.position >= len(proposal)
        beside = self.sibling is not None and self.sibling.after is None and self.position < len(proposal)
        return proposal[self.position] if beside or not (self.from_draft or unjudged) else None

    @property
    def sibling(self) -> TracedSibling | None:
        """The sibling or branch that this token is."""
        return next((one for one in self.round.siblings if one.stands and one.place == self.position), None)


def trace_page(prompt: str, request: "Request", decoder: "Decoder") -> str:
    """The page of a request that has finished and was traced."""
    output, tokenizer = request.output(), decoder.tokenizer
    tokens = list(written(request.prompt, output, tokenizer))
    drafted = sum(one.from_draft for one in tokens)
    body = [
        "<h1>Who wrote which token</h1>",
        f'<p class="muted">{escape(_about(request, decoder))}: {len(tokens)} tokens in '
        f"{output.speculation.rounds} rounds, {escape(summary(output.speculation))}. "
        "Point at a token, or move to it with the Tab key.</p>",
        f'<div class="key"><span class="draft">{drafted} proposed by the draft, accepted</span>'
        f'<span class="target">{len(tokens) - drafted} by the target itself</span>'
        '<label><input type="checkbox" id="rejected"> show what was rejected</label></div>',
        f'<div class="text"><span class="prompt">{_literal(prompt)}</span>'
        f"{''.join(_token(one, tokenizer) for one in tokens)}</div>",
    ]
    return page("Who wrote which token: trt-spec", STYLE, "\n".join(body))


def _about(request: "Request", decoder: "Decoder") -> str:
    bundle = decoder.bundle
    source = source_of_proposals(request.drafter, draft_of(bundle, request.drafter))
    return f"{bundle.target.name} with {source}, {length_of_drafts(request.draft_length)}, seed {request.seed}"


def written(prompt_ids: Sequence[int], output: Output, tokenizer: Any) -> Iterator[Written]:
    """The tokens of a traced output, whose texts add up to the text of the output."""
    from ...runtime.requests.text import TextStream

    stream, begun = TextStream(tokenizer, prompt_ids, ()), 0
    for number, traced in enumerate(output.trace, 1):
        ends = () if traced.next_token is None else (traced.next_token,)
        for position, token in enumerate((*traced.standing, *ends)):
            stream.push(token)
            last = number == len(output.trace) and position == traced.accepted + len(ends) - 1
            end = len(output.text) if last else min(len(stream.text), len(output.text))
            yield Written(output.text[begun:end], token, number, traced, position)
            begun = end


def _token(one: Written, tokenizer: Any) -> str:
    attributes = (
        f'class="{"draft" if one.from_draft else "target"}" tabindex="0" data-tip="{_literal(_tip(one, tokenizer))}"'
    )
    if not one.text or (one.text.isspace() and "\n" in one.text):
        attributes += f' data-mark="{"↵" if one.text else "▫"}"'
    if one.rejected is not None:
        attributes += f' data-rejected="{_literal(shown(one.rejected, tokenizer))}"'
    return f"<span {attributes}>{_literal(one.text)}</span>"


def _tip(one: Written, tokenizer: Any) -> str:
    traced, i = one.round, one.position
    token = f"{shown(one.token, tokenizer)}, token {one.token}, in round {one.number}"
    if one.sibling is not None:
        where = f"level {i + 1} of a branch beside the line"
        if one.sibling.after is None and i < len(traced.proposal):
            where = f"a sibling of {shown(traced.proposal[i], tokenizer)}, proposal {i + 1} of {len(traced.proposal)}"
        return f"{token}: {where}, accepted\n{_probabilities(one.sibling.p, one.sibling.q)}"
    if one.from_draft:
        return (
            f"{token}: proposal {i + 1} of {len(traced.proposal)}, accepted\n{_probabilities(traced.p[i], traced.q[i])}"
        )
    own = f"{token}: the target's own\np = {traced.next_p:.4f} by the target"
    if one.rejected is None:
        return own
    replaced = shown(one.rejected, tokenizer)
    return f"{own}\nin place of {replaced}, proposal {i + 1}, rejected: {_probabilities(traced.p[i], traced.q[i])}"


def _probabilities(p: float, q: float) -> str:
    return f"p = {p:.4f} by the target, q = {q:.4f} by the draft"


def _literal(text: str) -> str:
    """Escape a text so that a browser reads it back unchanged, but for NUL, which no page can hold."""
    return escape(text).replace("\r", "&#13;").replace("\0", "␀").replace("\n", "&#10;")
