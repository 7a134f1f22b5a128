"""A table of n-grams says what its counts say, back-off by back-off, on whatever text it was counted from."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from trt_spec.runtime import BundleError
from trt_spec.runtime.drafters.ngram_table import NGrams, read, to_bytes
from trt_spec.tools.making.count_ngrams import CONTINUATIONS, count_ngrams

MANY = 10**9


def table_of(tokens: list[int], vocab: int, order: int, most: int = MANY) -> NGrams:
    arrays, longest = count_ngrams(np.array(tokens), vocab, order, most)
    return NGrams.of_arrays(
        {name: array.astype(np.int64 if array.dtype.kind == "i" else np.float32) for name, array in arrays.items()},
        longest,
    )


def slow(tokens: list[int], vocab: int, order: int, context: list[int]) -> list[float]:
    """Witten and Bell's rule by its definition, the shorter context first."""
    counts = Counter(tokens)
    said = [(counts[w] + len(counts) / vocab) / (len(tokens) + len(counts)) for w in range(vocab)]
    for length in range(1, order):
        end = context[-length:]
        followers = Counter(tokens[i + length] for i in range(len(tokens) - length) if tokens[i : i + length] == end)
        if len(end) == length and followers:
            total = followers.total() + len(followers)
            said = [(followers[w] + len(followers) * p) / total for w, p in enumerate(said)]
    return said


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_are_those_of_the_rule_for_contexts_seen_and_unseen(order: int):
    """Float32 shares and products of at most five of them: 1e-6."""
    random = np.random.default_rng(order)
    for vocab, length in ((4, 60), (9, 200), (30, 100)):
        tokens = random.integers(0, vocab - 1, length).tolist()  # the last token is never seen
        table = table_of(tokens, vocab, order)
        contexts = [random.integers(0, vocab, order - 1).tolist() for _ in range(40)]
        contexts += [tokens[i : i + order - 1] for i in range(20)] + [tokens[length - order + 1 :]]
        found = table.after(torch.tensor(contexts).view(len(contexts), -1))
        expected = torch.tensor([slow(tokens, vocab, order, context) for context in contexts])
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert (found > 0).all(), "a request may exclude any tokens but all"


def test_a_context_that_reaches_before_the_first_token_is_a_shorter_one():
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3]
    table = table_of(tokens, 5, 4)
    short = torch.tensor([[-1, -1, 2], [-1, 1, 2], [-1, -1, -1]])
    expected = [slow(tokens, 5, 4, context) for context in ([2], [1, 2], [])]
    torch.testing.assert_close(table.after(short), torch.tensor(expected), atol=1e-6, rtol=0)


def test_what_the_commonest_followers_do_not_take_is_left_to_the_shorter_context():
    vocab = CONTINUATIONS + 20
    tokens = [token for follower in range(1, vocab) for token in (0, follower)] + [0, 1, 0, 1]
    table = table_of(tokens, vocab, 2)
    assert table.widest == CONTINUATIONS
    said = table.after(torch.tensor([[0]]))[0]
    assert said.sum().item() == pytest.approx(1, abs=1e-5)
    shorter = table.single
    taken = (said - table.left[0] * shorter > 1e-4).sum().item()
    assert taken == CONTINUATIONS
    assert said[1].item() == pytest.approx(3 / (85 + 83) + table.left[0].item() * shorter[1].item(), abs=1e-6)


@pytest.mark.parametrize("most", [0, 1, 10, 40, 100])
def test_a_bounded_table_keeps_the_contexts_seen_most_often(most: int):
    tokens = np.random.default_rng(0).zipf(1.5, 400).clip(max=9).tolist()
    whole, table = table_of(tokens, 10, 4), table_of(tokens, 10, 4, most)
    assert len(table.tokens) <= most < len(whole.tokens)
    assert table.longest < 4
    said = table.after(torch.tensor([tokens[i : i + table.longest] for i in range(50)]).view(50, -1))
    assert said.sum(1).tolist() == pytest.approx([1] * 50, abs=1e-5)
    if most >= 10:
        often = Counter(tokens).most_common(1)[0][0]
        expected = slow(tokens, 10, 2, [often])
        assert table.longest > 0
        context = torch.full((1, table.longest), -1)
        context[0, -1] = often
        torch.testing.assert_close(table.after(context)[0], torch.tensor(expected), atol=1e-6, rtol=0)


def test_a_table_comes_back_from_its_file_as_it_was(tmp_path: Path):
    arrays, longest = count_ngrams(np.array([1, 2, 3, 1, 2, 4] * 5), 6, 3, MANY)
    (tmp_path / "table.npz").write_bytes(to_bytes(arrays, longest))
    table = read(tmp_path / "table.npz", 6)
    context = torch.tensor([[1, 2], [2, 1], [5, 5]])
    assert torch.equal(table.after(context), table_of([1, 2, 3, 1, 2, 4] * 5, 6, 3).after(context))


def test_a_table_that_does_not_fit_is_refused(tmp_path: Path):
    arrays, longest = count_ngrams(np.array([1, 2, 3, 1, 2, 4] * 5), 6, 3, MANY)
    file = tmp_path / "table.npz"

    def refused(content: bytes, vocab: int = 6) -> str:
        file.write_bytes(content)
        with pytest.raises(BundleError) as error:
            read(file, vocab)
        message = str(error.value)
        assert message.startswith(f"{file} ")
        assert message.endswith("; count it again with trt-spec ngram")
        return message

    assert "counts a vocabulary of 6 tokens, the bundle has 7" in refused(to_bytes(arrays, longest), 7)
    assert "is not a table of n-grams" in refused(b"garbage")
    assert "is not a table of n-grams" in refused(to_bytes(arrays, longest)[:300])
    for forged in (
        {"tokens": arrays["tokens"] + 5},
        {"offsets": arrays["offsets"] * 2},
        {"offsets": arrays["offsets"][::-1].copy()},
        {"keys": arrays["keys"][1:]},
        {"left": arrays["left"][None]},
        {"left": arrays["left"] * 0},
    ):
        assert "its arrays do not fit together" in refused(to_bytes(arrays | forged, longest))
    assert "its arrays do not fit together" in refused(to_bytes(arrays, 0))
