"""The rules of speech are those of transformers, for any proposals that come before a position."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import SuppressTokensAtBeginLogitsProcessor
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance.filters.speech import Speech, SpeechRules
from trt_spec.runtime.state.proposal import ProposedTokens
from trt_spec.runtime.state.tree import Tree

VOCAB, END, SILENT, FIRST = 40, 19, 21, 22
ROWS = 3


def by_transformers(said: list[int], scores: torch.Tensor, rules: SpeechRules) -> torch.Tensor:
    scores = scores[None].clone()
    ids = torch.tensor([said], dtype=torch.int64)
    if rules.begin_unsaid:
        scores = SuppressTokensAtBeginLogitsProcessor(list(rules.begin_unsaid), 0)(ids, scores)
    if rules.timed:
        config = SimpleNamespace(
            no_timestamps_token_id=SILENT, eos_token_id=END, max_initial_timestamp_index=rules.latest_first
        )
        scores = WhisperTimeStampLogitsProcessor(config, 0)(ids, scores)
    return scores[0]


@pytest.mark.parametrize("latest", [None, 5])
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_they_are_those_of_transformers_at_each_position_of_a_round(seed: int, timed: bool, latest: int | None) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rules = SpeechRules((3, 4), timed, END, SILENT, FIRST, latest)
    one, plain = Speech(), SamplingParams()
    columns = one.columns(ROWS, VOCAB, "cpu")
    one.admit(columns, 0, plain, [], VOCAB)  # passes unchanged
    for row in range(1, ROWS):
        one.admit(columns, row, SamplingParams(extra={"speech": rules}), [], VOCAB)
    said: list[list[int]] = [[] for _ in range(ROWS)]
    for _ in range(30):
        proposals = choose.randint(0, 4)
        scores = 2 * torch.randn(ROWS, proposals + 1, VOCAB, generator=generator)
        tokens = torch.zeros(ROWS, proposals + 1, dtype=torch.int64)  # such as stand, and the one after them
        for row in range(ROWS):
            for place in range(proposals + 1):
                allowed = by_transformers(said[row] + tokens[row, :place].tolist(), scores[row, place], rules)
                tokens[row, place] = torch.multinomial(allowed.softmax(0), 1, generator=generator)
        committed, tokens = tokens, tokens[:, :-1]
        found = one.apply(scores, columns, ProposedTokens(tokens))
        for row in range(ROWS):
            for place in range(proposals + 1):
                history = said[row] + tokens[row, :place].tolist()
                expected = by_transformers(history, scores[row, place], rules) if row else scores[row, place]
                assert torch.equal(found[row, place], expected), (row, history)
        if proposals:  # a draft asks position by position
            step = one.apply(scores[:, :1], columns, ProposedTokens(tokens))
            assert torch.equal(
                step[1], one.apply(scores[:, [0] * (proposals + 1)], columns, ProposedTokens(tokens))[1, -1:]
            )
        accepted = torch.tensor([choose.randint(0, proposals) for _ in range(ROWS)])
        one.commit(columns, committed, accepted)
        for row in range(ROWS):
            said[row] += committed[row, : accepted[row] + 1].tolist()
        if max(map(len, said)) > 12 or max(max(one) for one in said) > VOCAB - 4:
            said = [[] for _ in range(ROWS)]
            one.admit(columns, 0, plain, [], VOCAB)
            for row in range(1, ROWS):
                one.admit(columns, row, SamplingParams(extra={"speech": rules}), [], VOCAB)


@pytest.mark.parametrize("seed", range(8))
def test_in_a_tree_each_node_has_the_rules_of_its_own_path(seed: int) -> None:
    """A line of two with two branches beside its first token and one behind each, or with a further line."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rules, one = SpeechRules((3, 4), True, END, SILENT, FIRST, 5), Speech()
    grown = Tree(ROWS, 2, [True], 4, torch.device("cpu"))
    parents = torch.tensor([[0, 0, 3, 4]] * ROWS)  # nodes 1 and 2 are the line
    for first in (0, 2):
        mine = (torch.arange(4) // 2 == first // 2).expand(ROWS, 4)
        grown.place(mine, parents, torch.zeros_like(parents), torch.zeros_like(parents), mine)
    for tree in (grown, Tree(ROWS, 2, [True, False], 0, torch.device("cpu"))):
        nodes = len(tree.numbers)
        columns, said = one.columns(ROWS, VOCAB, "cpu"), list[list[int]]()
        for row in range(ROWS):
            one.admit(columns, row, SamplingParams(extra={"speech": rules}), [], VOCAB)
            said.append([FIRST, 7, FIRST + 3, FIRST + 3, 8][: choose.randint(0, 5)])
            for token in said[row]:
                own = {name: column[row : row + 1] for name, column in columns.items()}
                one.commit(own, torch.tensor([[token]]), torch.zeros(1, dtype=torch.int64))
        scores, tokens = 2 * torch.randn(ROWS, nodes, VOCAB, generator=generator), torch.zeros(ROWS, nodes).long()
        expected = torch.zeros_like(scores)
        for row, own in enumerate(tree.parents.tolist()):
            for node in range(nodes):
                path = [int(tokens[row, each]) for each in tree.path_to(node, own)]
                expected[row, node] = by_transformers(said[row] + path, scores[row, node], rules)
                for behind in (each for each in range(1, nodes) if own[each - 1] == node):
                    tokens[row, behind] = torch.multinomial(expected[row, node].softmax(0), 1, generator=generator)
        tokens = tokens[:, 1:]
        found = one.apply(scores, columns, ProposedTokens(tokens, tree))
        assert torch.equal(found, expected)
        some = torch.randint(nodes, (ROWS, 3), generator=generator)
        at_some = one.apply(scores.take_along_dim(some[:, :, None], 1), columns, ProposedTokens(tokens, tree, some))
        assert torch.equal(at_some, found.take_along_dim(some[:, :, None], 1))
