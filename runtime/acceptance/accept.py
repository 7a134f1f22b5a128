"""The exact test of what rows propose: which path of nodes stands, and which token follows it.

coupled:   the target picks its token with the noise of the index; this token follows, whatever was proposed there.
rejection: the first line is judged by itself; `descent.py` goes on where it falls. tokenwise does the same.
lenience:  greedy rows take the longest path of tokens that are each likely enough; the others are tokenwise.
"""

import torch
from torch import Tensor

from ..state.indexing import at_nodes, counting, pick
from ..state.tree import Tree
from ..state.verdict import TreeVerdict
from .descent import descend
from .exam import Exam
from .one_line import judge, likely_enough, put_next


def accept(exam: Exam) -> None:
    """Judge what was proposed: first a line as if it were alone, then what is beside it, if anything is."""
    proposal, scores, rows, plan, noise, verdict, _ = exam
    if plan.probabilities:
        exam = exam._replace(p=scores.softmax(-1))
    verdict.target_probabilities = exam.p
    if not isinstance(verdict, TreeVerdict):
        judge(exam)
        return
    tree, tokens, k = proposal.tree, proposal.tokens, plan.draft_length
    assert tree is not None
    by_line = plan.draws or plan.lenient  # else each row picks its path itself, whatever its shape
    if by_line:
        distribution = judge(exam.of_line())
        places = counting(k + 1, tokens.device)
        verdict.put(None, verdict.accepted, places * (places <= verdict.accepted[:, None]))
        if distribution is not None:
            go_on(distribution, rows.more & ~rows.coupled, exam, verdict)
    if plan.coupled:
        gumbel = None if noise.gumbel is None else at_nodes(noise.gumbel, tree.depths)
        verdict.picked.pick(scores, gumbel)
        passed = verdict.picked.tokens.gather(1, tree.parents) == tokens
        if plan.lenient:
            passed |= likely_enough(at_nodes(scores, tree.parents), tokens, rows)
        walked = rows.more & rows.coupled if by_line else None
        verdict.put(walked, *deepest(passed & tree.exists, tree, k))
        picked = verdict.picked.tokens.gather(1, verdict.path)
        if plan.lenient:  # what stands need not be what the target would have picked
            stands = counting(k, tokens.device) < verdict.accepted[:, None]
            picked[:, :k] = torch.where(stands, along(tokens, verdict), picked[:, :k])
        verdict.tokens.copy_(picked if walked is None else torch.where(walked[:, None], picked, verdict.tokens))
    torch.amax(tree.depths[:, 1:] * tree.behind(tokens, verdict), 1, out=verdict.proposed)


def go_on(distribution: Tensor, some: Tensor, exam: Exam, verdict: TreeVerdict) -> None:
    """Let `some` rows [A] go on where their first line falls and leaves a distribution [A, V] for the next token."""
    distribution = descend(distribution / distribution.sum(-1, keepdim=True), some, exam, verdict)
    before = verdict.tokens.clone()
    put_next(distribution, along(exam.proposal.tokens, verdict), exam)
    verdict.tokens.copy_(torch.where(some[:, None], verdict.tokens, before))


def deepest(passed: Tensor, tree: Tree, k: int) -> tuple[Tensor, Tensor]:
    """Return the depth [A] of the deepest node that has passed [A, N] and whose ancestors all have, and its path."""
    falls = (tree.ancestors[:, :, 1:] & ~passed[:, None]).any(-1)  # [A, N+1]
    depth, last = tree.depths.masked_fill(falls, 0).max(1)
    own = pick(tree.ancestors, last)
    path = torch.zeros(len(passed), k + 1, dtype=torch.int64, device=passed.device)
    return depth, path.scatter_(1, tree.depths * own, tree.nodes * own)


def along(tokens: Tensor, verdict: TreeVerdict) -> Tensor:
    """Return the proposals [A, K] of the path, garbage behind the last."""
    return tokens.gather(1, (verdict.path[:, 1:] - 1).clamp_(min=0))
