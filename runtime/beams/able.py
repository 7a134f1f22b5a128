"""Says who can search with beams: the target, and drafters that run a model as the target is run."""

from collections.abc import Mapping, Sequence

from ...engines import TAILS, RequestError
from ..drafters.drafter import Drafter
from ..drafters.model import DraftModel
from ..memory.model import Model
from ..requests.request import Request
from ..state.asked import NONE


def beamless(target: Model, drafters: Mapping[str, Drafter]) -> dict[str, str]:
    """Return what beams would need of the drafters that cannot propose them, and of the target as that of none."""
    found = {
        name: f"drafter model or none, not {name}" for name, one in drafters.items() if not isinstance(one, DraftModel)
    }
    models = {NONE: target} | {name: one.model for name, one in drafters.items() if name not in found and one.model}
    return found | {name: lack for name, model in models.items() if (lack := _lack(model))}


def _lack(model: Model) -> str | None:
    if model.recurrent:
        return "models whose layers all attend: what recurrent layers keep cannot branch"
    if TAILS not in model.engine.contract.capabilities:
        return "graphs that take branches before a call; export the bundle again"
    if not model.engine.takes_tails:
        return "an engine whose calls take branches before them; use onnxruntime or torch"
    return None


def refuse_long(request: Request, models: Sequence[Model], capacity: int) -> None:
    """Refuse beams that may not fit into caches that cannot grow, and more beams than a vocabulary has tokens for."""
    params = request.params
    if params.num_beams == 1:
        return
    needed = request.most_entries + request.drafting.widest()
    if needed > capacity and any(model.engine.static_capacity for model in models):
        raise RequestError(
            f"num_beams {params.num_beams} and max_new_tokens {params.max_new_tokens} may need {needed} entries of a "
            f"cache, and this engine's have {capacity}; lower either",
            "num_beams",
        )
    looked_at, tokens = max(2, 1 + len(request.stop_ids)) * params.num_beams, models[0].vocab_size
    if looked_at > tokens:
        raise RequestError(
            f"num_beams is {params.num_beams}, whose steps look at {looked_at} tokens, of which there are {tokens}; "
            "lower it",
            "num_beams",
        )
