"""Refuses parameters that make no sense."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .checks import require
from .filters import FILTERS
from .filters.bias import Bias
from .filters.forced_end import ForcedEnd
from .filters.min_tokens import MinTokens
from .filters.temperature import Temperature
from .parameter_fields import ParameterFields
from .ranges import refuse_beside_beams, refuse_out_of_range

OF_BEAMS = (Bias, ForcedEnd, MinTokens, Temperature)  # filters that a search applies itself


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
class SamplingParams(ParameterFields):
    """Parameters, validated once, here; `HELP` explains each. Collections are copied, so they cannot change later."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        refuse_out_of_range(self)
        known = {name for one in FILTERS for name in one.fields} - set(self.__dataclass_fields__)
        sound = isinstance(self.extra, Mapping) and set(self.extra) <= known
        require("extra", self.extra, sound, f"a mapping with no keys but {sorted(known)}, which added filters read")
        for one in FILTERS:
            one.check(self)
        refuse_filters_beside_beams(self)
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("logit_bias", "extra"):
            object.__setattr__(self, name, Frozen(getattr(self, name)))


def refuse_filters_beside_beams(params: ParameterFields) -> None:
    """Refuse filters that a search would have to apply, and does not."""
    if params.num_beams == 1:
        return
    others = [one for one in FILTERS if not isinstance(one, OF_BEAMS) and one.active(params)]
    refuse_beside_beams(params, [name for one in others for name in one.fields])
