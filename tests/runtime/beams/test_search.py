"""A search divides scores by the power of the right length and ends at the right step; the numbers are given."""

import numpy as np
import pytest
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.beams.node import Best, Node
from trt_spec.runtime.beams.search import Search

STOP = 1
SAID = {  # log-probabilities of what may follow each text
    (): {2: -0.5, 3: -0.6, STOP: -9.0},
    (2,): {STOP: -0.5, 2: -0.7, 3: -8.0},
    (3,): {3: -1.4, STOP: -9.0, 2: -9.5},
    (2, 2): {STOP: -0.8, 2: None, 3: -8.0},
    (3, 3): {3: -9.0, STOP: -9.5, 2: -9.6},
}


def searched(going_on: float) -> Search:
    """Two beams after three steps: one text has ended at the second, one at the third, where one more goes on.

    `going_on` is the sum of the log-probabilities of its three tokens.
    """
    params = SamplingParams(num_beams=2, num_return_sequences=2, length_penalty=2.0, max_new_tokens=10)
    search = Search(params, frozenset({STOP}), Node(None, -1, -1))
    for _ in range(3):
        for beam in search.running:
            text = tuple(node.token for node in beam.node.path())
            said = {token: going_on + 1.2 if score is None else score for token, score in SAID[text].items()}
            best = sorted(said, key=lambda token: -said[token])
            beam.node.said = Best(np.array([said[token] for token in best], np.float32), np.array(best))
        assert not search.done
        search.step()
    return search


def test_a_text_is_rated_by_its_length_with_its_last_token() -> None:
    """By one token more the shorter text would be the better one."""
    first, second = searched(-4.5).best()
    assert (first.tokens, second.tokens) == ([2, 2, STOP], [2, STOP])
    assert first.score == pytest.approx(-2.0 / 3**2)
    assert second.score == pytest.approx(-1.0 / 2**2)


@pytest.mark.parametrize(
    ("going_on", "done"),
    [
        (-0.24 * 3**2, False),  # above the worst text that has ended, -0.25; by two tokens it would lie below
        (-0.26 * 3**2, True),  # below it; by four tokens it would lie above
    ],
)
def test_a_search_ends_when_the_tokens_so_far_leave_nothing_to_gain(going_on: float, done: bool) -> None:
    assert searched(going_on).done == done
