"""Grammars spell words of the letters that tiny models have."""

from trt_spec.runtime import Grammar

WORDS = Grammar.regex("([a-f]{1,3} )*[a-f]+[0-9]{2}")
NESTED = Grammar.lark(
    'start: "(" start ")" | LETTERS | start " " start\nLETTERS: /[a-z]{1,4}/'.replace('"("', '"A"').replace(
        '")"', '"B"'
    )
)
