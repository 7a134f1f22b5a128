"""Grammars spell words of the letters that tiny models have."""

from collections.abc import Sequence

from trt_spec.runtime import Grammar

EOS = 1

WORDS = Grammar.regex("([a-f]{1,3} )*[a-f]+[0-9]{2}")
NESTED = Grammar.lark(
    'start: "(" start ")" | LETTERS | start " " start\nLETTERS: /[a-z]{1,4}/'.replace('"("', '"A"').replace(
        '")"', '"B"'
    )
)

# One language twice: as a regex, and as an automaton that tests walk by themselves.
SPELLED = Grammar.regex("((a|b?c)[d-f])*")
AUTOMATON: dict[int, dict[int, int]] = {  # of tokens: a is 2
    0: {2: 1, 3: 2, 4: 1, EOS: 3},
    1: {5: 0, 6: 0, 7: 0},
    2: {4: 1},
    3: {EOS: 3},  # ended: a text is filled up with ends
}


def state_after(prefix: Sequence[int]) -> int | None:
    state: int | None = 0
    for token in prefix:
        state = None if state is None else AUTOMATON[state].get(token)
    return state
