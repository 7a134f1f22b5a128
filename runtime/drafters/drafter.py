"""The interface of every drafter: it makes proposals, with a part on the host and a part on the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...engines import Bundle
from ..memory.model import Model
from ..state.frame import DraftedLine, Frame
from ..state.indexing import pick
from ..state.needs import lack, model_of
from ..state.plan import LEAST_WINDOW, Plan, Prepared
from ..state.proposal import Noise
from ..state.rows import Columns, Rows
from .asking import Asking
from .foreign_draft import ForeignDraft


@dataclass(frozen=True)
class Resources:
    """The parts of a decoder that a drafter may use."""

    bundle: Bundle
    target: Model
    drafts: Mapping[str, Model]  # drafts and heads, by their names in the bundle
    max_batch: int
    foreign: ForeignDraft | None = None  # if the bundle has a draft with tokens of its own


class Drafter:
    """Each decoder makes one object of each kind; it owns all that the drafter needs and remembers."""

    name: ClassVar[str]
    samples: ClassVar[bool] = False  # a Sampler, else a Copier
    needs_model: ClassVar[bool] = False  # runs a draft model, whose cache must be complete by then
    which_draft: ClassVar[int] = 0  # of the bundle's, if it needs one
    usual: ClassVar[bool] = True  # worth naming where a bundle cannot have it
    has_copies: ClassVar[bool] = False  # a row may have several lines of it, each with another copy
    beside_others: ClassVar[bool] = True  # a row may have lines of other drafters as well
    copies_predictions: ClassVar[bool] = False  # it proposes a predicted output; one drafter does
    always_unsure: ClassVar[bool] = False  # a rule that goes by entropy would never let it propose
    in_words: ClassVar[str] = "proposals by {name}"  # and {draft}, the model that it runs
    may_come_short: ClassVar[bool] = False  # rows may get fewer proposals than the plan says
    reads_outputs: ClassVar[bool] = False  # the host must read a round before it can propose the next
    in_mixed: ClassVar[bool] = False  # drafter mixed chooses among these
    costs_as: ClassVar[str | None] = None  # the drafter whose rounds cost the same, measured for both
    looks_ahead: ClassVar[bool] = False  # the target's pass of each round says what it proposes in the next

    def __init__(self, place: int, resources: Resources) -> None:
        self.place = place  # its column in `Rows.asked`
        self.target = resources.target
        name = self.model_name(resources.bundle)
        self.model = None if name is None else resources.drafts[name]

    @property
    def treeless(self) -> str | None:
        """Say why it can grow no tree; None if it can."""
        return "can grow no tree here"

    @classmethod
    def model_name(cls, bundle: Bundle) -> str | None:
        """Return the name of the bundle's model that it runs; None if it runs none, or the bundle has none."""
        return model_of(cls.name, bundle)

    @classmethod
    def unavailable(cls, resources: Resources) -> str | None:
        """Say why a decoder with these resources cannot have this drafter; None if it can."""
        return lack(cls.name, resources.bundle)

    # On the host, between rounds.

    def ready(self, request: Asking, most: int, turn: int) -> int:
        """Return how many tokens, at most `most`, it will propose in the next round of this request.

        It is asked for each line that the request has of it, which are counted by `turn`.
        """
        return most

    def load(self, requests: Sequence[Asking], draft_length: int) -> None:
        """Copy the proposals for the live requests to the device; request i has row i."""

    def look_aheads(self, length: int) -> int:
        """Return how many look-aheads the target reads where a row asks for so many proposals."""
        return 0

    def columns(self, rows: int) -> Columns:
        """Make what it keeps of each row."""
        return {}

    def seated(self, request: Asking, rows: Rows, row: int) -> None:
        """Begin with a request in a row, or go on with one that had given up its own."""

    def gave_up(self, request: Asking, rows: Rows, row: int) -> None:
        """Keep what a request has in its row, which it gives up."""

    def ended(self, request: Asking) -> None:
        """Release what belongs to a request that has ended."""

    def forget(self) -> None:
        """Forget what was learned from ended requests."""

    def window(self, widest: int) -> int:
        """Return how many committed tokens its model reads first, if drafts are to read up to `widest`."""
        return LEAST_WINDOW

    def reads_first(self, window: int) -> bool:
        """Whether so many committed tokens fit into the step of its model that reads them."""
        return self.model is None or (not self.model.recurrent and self.model.engine.runs(window, 1))

    # On the device.

    def prepare(self, frame: Frame, line: DraftedLine) -> Prepared:
        """Make its draft model's steps over the tensors of a frame and of a line; asked only if it needs the model."""
        return Prepared([])

    def asked(self, line: int, rows: Rows) -> Tensor:
        """Return how many proposals [A] each row takes from it for this line."""
        return rows.asked[:, line, self.place]

    def keep(self, rows: Rows, frame: Frame) -> None:
        """Keep what a round has said of the next, once its tokens are committed; asked only if it looks ahead."""


class Sampler(Drafter):
    """Draws its tokens one after another, each from a distribution."""

    samples = True

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        """Return a function that gives the logits [A, 1, V] of proposal i once all earlier ones are drawn."""
        raise NotImplementedError

    def doubt(self, i: int, logits: Tensor, frame: Frame, line: DraftedLine) -> Tensor:
        """Return how unsure it is of proposal i [A, 1], from 0 to 1: the entropy of its logits unless it knows better.

        A row may end before a proposal that is in doubt. So the doubt must be known before that proposal is drawn, from
        the tokens drawn before it. Then whether a row goes on after some tokens depends on those tokens alone, as if
        its length had been chosen for them beforehand, and each proposal was drawn from its q. If a token had a say in
        whether it is proposed itself, those that are proposed would follow another distribution than q, and the test
        would bias what is said.
        """
        return normalised_entropy(logits[:, 0])


def normalised_entropy(logits: Tensor) -> Tensor:
    """Return the entropy [A, 1] of the softmax of logits [A, V], scaled to lie from 0 to 1."""
    nats: Tensor = torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)
    return nats / torch.full_like(nats, logits.shape[-1]).log_()


class Offer(NamedTuple):
    """Tokens for a line of all rows; rows that did not ask for them propose none."""

    tokens: Tensor  # [A, K]
    proposed: Tensor  # [A], how many of the tokens each row proposes
    probabilities: Tensor | None = None  # q [A, K, V]; None: each token was certain


class Copier(Drafter):
    """Offers all its tokens at once; where a row has several lines of it, each has another copy."""

    def offer(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Callable[[int], Offer]:
        """Return a function that gives the proposals of a line; every committed length is below `span`."""
        raise NotImplementedError


def of_turn(copies: Sequence[Tensor], rows: Rows, line: int) -> Tensor:
    """Return which of these copies [A, …] each row has in this line."""
    return copies[0] if len(copies) == 1 else pick(torch.stack(list(copies), 1), rows.turns[:, line])
