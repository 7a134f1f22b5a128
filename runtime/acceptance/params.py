"""Refuses parameters that make no sense."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engines import RequestError
from .beams import check_beams
from .checks import real, require, whole
from .filters import FILTERS
from .parameters import RULES, Parameters

MAX_LOGPROBS = 20


class Frozen(Mapping[Any, Any]):
    """A copy of a mapping that nobody can change."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._items = dict(mapping)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class SamplingParams(Parameters):
    """Parameters, validated once, here; `HELP` explains each. Collections are copied, so they cannot change later."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        require("max_new_tokens", self.max_new_tokens, whole(self.max_new_tokens, 1), "a whole number >= 1")
        known = {name for one in FILTERS for name in one.fields} - set(self.__dataclass_fields__)
        sound = isinstance(self.extra, Mapping) and set(self.extra) <= known
        require("extra", self.extra, sound, f"a mapping with no keys but {sorted(known)}, which added filters read")
        for one in FILTERS:
            one.check(self)
        stop = self.stop
        strings = isinstance(stop, Sequence) and all(isinstance(text, str) and text for text in stop)
        require("stop", stop, strings, "a list of strings, none empty")
        ids = self.stop_token_ids
        sound = isinstance(ids, Sequence) and all(whole(i, 0) for i in ids)
        require("stop_token_ids", ids, sound, "a list of token ids")
        for name in ("include_stop", "show_special_tokens", "ignore_eos"):
            value = getattr(self, name)
            require(name, value, isinstance(value, bool), "true or false")
        sound = self.seed is None or whole(self.seed, 0, 2**64 - 1)
        require("seed", self.seed, sound, "a whole number below 2^64")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            sound = value is None or whole(value, 0, MAX_LOGPROBS)
            require(name, value, sound, f"a whole number from 0 to {MAX_LOGPROBS}")
        require("rule", self.rule, self.rule in RULES, f"one of {', '.join(RULES)}")
        require("lenience", self.lenience, real(self.lenience, 0, 1) and self.lenience > 0, "a number in (0, 1]")
        if self.lenient and self.rule == "coupled":
            raise RequestError(
                f"lenience {self.lenience} lets the draft change the text, but rule coupled gives one text for any "
                "draft; choose rule rejection, or lenience 1"
            )
        check_beams(self)
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("logit_bias", "extra"):
            object.__setattr__(self, name, Frozen(getattr(self, name)))
