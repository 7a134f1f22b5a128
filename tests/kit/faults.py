"""Further faults of speculative decoding, planted in the code that runs, beside the three of the certificate's own."""

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from trt_spec.runtime.acceptance import accept as accepting
from trt_spec.runtime.acceptance import block_verification, descent
from trt_spec.runtime.acceptance.accept import residual
from trt_spec.runtime.drafters.model import DraftModel
from trt_spec.runtime.memory.model import Model
from trt_spec.runtime.memory.row_cache import RowCache
from trt_spec.runtime.requests.request import Request
from trt_spec.runtime.round import growth, result
from trt_spec.runtime.round import propose as drafters
from trt_spec.runtime.round import round as round_
from trt_spec.runtime.round.round import commit
from trt_spec.runtime.scheduling.results import Results
from trt_spec.runtime.state.indexing import at_nodes
from trt_spec.runtime.state.noise import gumbels
from trt_spec.runtime.state.proposal import Proposal, ProposedTokens
from trt_spec.runtime.state.tree import Tree
from trt_spec.tools.certificate.faults import SWAPS as CONTROLS
from trt_spec.tools.certificate.faults import planted

SCHEDULER_COMMIT, REQUEST_COMMIT, LOGPROB_PARTS = Results.commit, Request.commit, result._logprob_parts
NOTE_WRITES, STRAIGHTEN = Results.note_writes, RowCache.straighten
MODEL_STEP: Any = Model.step
DRAWN_FROM, DESCEND = Proposal.drawn_from, accepting.descend


def likeliest(weights: Any, u: Any) -> Any:
    """Pitfall 2: a greedy draft whose q is declared a softmax."""
    return weights.argmax(-1, keepdim=True)


def p_without_the_rejected(proposal: Any, target: Any, accepted: Any, *lenience: Any) -> Any:
    """Right for a certain proposal, wrong for a sampled one: the residual of another q."""
    certain = proposal._replace(probabilities=None)
    return residual(certain, target, accepted, *lenience)


def ended_by_its_first_failure(stands: Any, places: Any, out: Any) -> None:
    """A block keeps what its last passing test came to, whatever failed before."""
    torch.sum(stands.cumprod(1), 1, out=out)


def without_denominator(u: Any, weights: Any, rests: Any) -> Any:
    """S instead of S / (S + 1 − w)."""
    return torch.where(rests < 1, u < weights + rests - 1, u < weights)


def one_end_for_all(*_: Any) -> None:
    """A block goes on behind its row's own last proposal, as the widest row's does."""


def counts_before_the_round(self: Any, before: Any, width: int) -> Any:
    """Pitfall 8."""
    return before[:, None].expand(-1, width, -1)


def one_length_for_all(rows: Any, plan: Any, frame: Any) -> None:
    """Pitfall 6: every row advances by what the worst one accepted."""
    commit(rows, plan, frame)
    accepted = frame.verdict.accepted
    rows.length.sub_(accepted - accepted.min())


def claims_a_hole(self: Any, occupant: Any, share: Any, result: Any) -> None:
    """Pitfall 1: the draft never wrote the entry of its own last proposal."""
    SCHEDULER_COMMIT(self, occupant, share, result)
    for source in map(self._planner.drafters.__getitem__, share.names[:1]):
        if isinstance(source, DraftModel) and source.model is not None:
            source.model.cache.entries[occupant.row] = self._target.cache.entries[occupant.row]


def moves_without_its_memory(self: Any, source: int, destination: int) -> None:
    self.entries[destination], self.entries[source] = self.entries[source], 0


def noise_of_the_first_row(seed: Any, index: Any, size: int) -> Any:
    """Pitfall 9: a request depends on its neighbours."""
    return gumbels(seed[:1].expand_as(seed), index, size)


def keeps_the_whole_run(self: Any, tokens: Any, accepted: int, logprobs: Any) -> Any:
    """Pitfall 7: stop tokens are looked for only where a round ends."""
    stop_ids = self.stop_ids
    if accepted and tokens[-1] not in stop_ids:
        self.stop_ids = frozenset()
    kept = REQUEST_COMMIT(self, tokens, accepted, logprobs)
    self.stop_ids = stop_ids
    return kept


def log_probabilities_of_the_row_before(done: Any, top: int) -> Any:
    """Pitfall 16."""
    return LOGPROB_PARTS(done._replace(reported=done.reported.roll(1, 1)), top)


def likeliest_children(q: Any, line: Any, u: Any) -> Any:
    """Chosen, not drawn, and yet tested by q."""
    width, scores = line.shape[1], q.log()
    return growth.nearly_picked(scores[:, :width].clone(), line, scores[:, width:], u.shape[2])


def drawn_from_the_first_distribution(self: Any, distribution: Any, token: Any, vocab_size: int) -> Any:
    """What follows a branch, or another line, is tested as if it had been drawn as the first token was."""
    return DRAWN_FROM(self, distribution * 0, token, vocab_size)


def all_of_q(q: Any, token: Any) -> Any:
    """What has failed stays in q."""
    return q


def what_the_line_leaves(distribution: Any, *others: Any) -> Any:
    """The token after siblings that failed is drawn as if only the line's had."""
    verdict = others[-1].verdict
    accepted, found = verdict.accepted.clone(), DESCEND(distribution, *others)
    return torch.where((verdict.accepted == accepted)[:, None], distribution, found)


def noise_of_nodes(self: Any, values: Any) -> Any:
    """Pitfall 9: a token's noise depends on its place in the tree, not in the text."""
    return at_nodes(values, self.numbers.expand_as(self.depths) % values.shape[1])


def one_path_for_all(self: Any, start: Any, path: Any) -> None:
    """Pitfall 6: every row's entries move as the first row's do."""
    STRAIGHTEN(self, start, path[:1].expand_as(path))


def left_where_they_are(*_: Any) -> None:
    """The entry of an accepted sibling is never moved after the line."""


def telling(change: Any) -> Any:
    """The graph of the target is told something else of each tree than what the round knows."""

    def step(self: Any, tokens: Any, *arguments: Any, **named: Any) -> Any:
        ancestry = tokens.ancestry
        if ancestry is None:
            return MODEL_STEP(self, tokens, *arguments, **named)
        told = copy(ancestry)
        told.depths, told.ancestors = ancestry.depths.clone(), ancestry.ancestors.clone()
        made = MODEL_STEP(self, replace(tokens, ancestry=told), *arguments, **named)

        def run() -> None:
            told.depths.copy_(ancestry.depths)
            told.ancestors.copy_(ancestry.ancestors)
            change(told)
            made.run()

        return replace(made, run=run)

    return step


def siblings_see_siblings(tree: Any) -> None:
    theirs = slice(tree.length + 1, tree.length + 1 + tree.branches)
    tree.ancestors[:, theirs, theirs] |= torch.ones(tree.branches, tree.branches, dtype=torch.bool).tril()


def positions_by_column(tree: Any) -> None:
    tree.depths.copy_(tree.numbers.expand_as(tree.depths))


def lines_see_lines(tree: Any) -> None:
    tree.ancestors[:, tree.length + 1 :, 1 : tree.length + 1] |= tree.lines > 1


def flat(*arguments: Any) -> Any:
    """What is beside the first line is tested as if all tokens had been equally likely."""
    q = DRAWN_FROM(*arguments)
    return torch.full_like(q, 1 / q.shape[-1])


def claims_a_sibling(self: Any, row: int, before: int, share: Any, result: Any) -> None:
    """Pitfall 1: the draft never read the sibling that stands, only the line's token beside it."""
    NOTE_WRITES(self, row, before, share, result._replace(proposed=result.proposed + bool(result.beside)))


def claims_another_line(self: Any, row: int, before: int, share: Any, result: Any) -> None:
    """Pitfall 1: the draft never read what another line has proposed."""
    NOTE_WRITES(self, row, before, share, result)
    for source in map(self._planner.drafters.__getitem__, share.names if len(share.lines) > 1 else ()):
        if source.model is not None:
            source.model.cache.entries[row] = before + max(0, result.accepted - 1)


def log_probabilities_along_the_line(self: Any, values: Any, verdict: Any) -> Any:
    """Pitfall 16: what follows a sibling is read where the line's own token is."""
    return values[:, : verdict.path.shape[1]]


SWAPS: dict[str, tuple[tuple[Any, str, Any], ...]] = CONTROLS | {
    "residual of another q": ((accepting, "residual", p_without_the_rejected),),
    "block ended by its first failure": ((block_verification, "count_accepted", ended_by_its_first_failure),),
    "block test without its denominator": ((block_verification, "passes", without_denominator),),
    "one end for all blocks": ((block_verification, "end_early", one_end_for_all),),
    "greedy draft declared sampled": ((drafters, "inverse_cdf", likeliest),),
    "penalties over the context before the round": ((ProposedTokens, "counts", counts_before_the_round),),
    "prediction judged by the noise that made it": ((Request, "noise_seed", property(lambda one: one.seed)),),
    "one length for all rows": ((round_, "commit", one_length_for_all),),
    "hole after full acceptance": ((Results, "commit", claims_a_hole),),
    "cache left behind when a row moves": ((RowCache, "move", moves_without_its_memory),),
    "noise of the first row in all rows": ((round_, "gumbels", noise_of_the_first_row),),
    "end of text kept inside an accepted run": ((Request, "commit", keeps_the_whole_run),),
    "log-probabilities of the row before": ((result, "_logprob_parts", log_probabilities_of_the_row_before),),
    "children chosen, not drawn": ((growth, "drawn_in_turn", likeliest_children),),
    "q of a branch taken from the root": ((Proposal, "drawn_from", drawn_from_the_first_distribution),),
    "q of a sibling not renormalised": ((descent, "without", all_of_q),),
    "residual of the line after its siblings": ((accepting, "descend", what_the_line_leaves),),
    "noise of nodes, not of indices": ((Tree, "at_depths", noise_of_nodes),),
    "cache entries of all rows moved as the first row's": ((RowCache, "straighten", one_path_for_all),),
    "cache entry of a sibling left where it is": ((RowCache, "straighten", left_where_they_are),),
    "sibling seen by a sibling": ((Model, "step", telling(siblings_see_siblings)),),
    "positions by column": ((Model, "step", telling(positions_by_column)),),
    "hole after a sibling": ((Results, "note_writes", claims_a_sibling),),
    "line seen by another": ((Model, "step", telling(lines_see_lines)),),
    "q of lines declared flat": ((Proposal, "drawn_from", flat),),
    "hole after another line": ((Results, "note_writes", claims_another_line),),
    "log-probabilities along the line": ((Tree, "along", log_probabilities_along_the_line),),
}


def fault(name: str) -> Any:
    """A context in which the fault of this name is in the code."""
    return planted(*SWAPS[name])
