"""Turns what callers ask for into a request, or into an error that says in one sentence why it cannot be one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from ...engines import Bundle, RequestError
from ..acceptance.sampling_params import SamplingParams
from ..drafters import PREDICTING, usual_drafter
from ..drafters.model import DraftModel
from ..grammars.compiler import Compiler
from ..images.opening import numbered
from ..images.picture import Picture
from ..images.reader import ImageReader
from ..lengths.drafting import DraftingRules
from ..memory.adapter_pool import Loaded
from ..memory.sight import Sight
from ..requests.bounds import refuse_foreign_tokens, refuse_images, refuse_long, refuse_source, require_token
from ..requests.prompts import Prompt, encode
from ..requests.request import Request
from ..requests.text import TextStream
from ..sources.source import Source, read_source
from ..state.asked import BESIDE, NONE, Drafting, DraftLength


class Intake:
    """Makes the requests of one decoder; any thread may ask for them."""

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer, rules: DraftingRules) -> None:
        self.grammars = Compiler(bundle)
        self._bundle, self._tokenizer, self._rules = bundle, tokenizer, rules
        self._vocab_size = bundle.tokenizer.vocab_size
        self._encoders = [encoder.contract for encoder in bundle.encoders.values()]
        self.images = None if bundle.vision is None else ImageReader.open(bundle.path)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        draft_length: DraftLength | None,
        drafter: str | None,
        trace: bool,
        on_progress: Callable[[Request], None] | None,
        cache_salt: str,
        prediction: Prompt,
        priority: int,
        source: Any,
        adapter: Loaded | None,
        images: Sequence[bytes | Picture] = (),
        said: int = 0,
    ) -> Request:
        """Make a request that is valid for the bundle, with the defaults for what was left open."""
        if type(priority) is not int:
            raise RequestError(f"priority is {priority!r}, expected a whole number", "priority")
        read_from = self._source(source)
        ids, sight = self._with_images(prompt, images, said)
        if sight is None:
            ids = self._encode(prompt) if read_from is None else self._beginning(prompt)
        refuse_long(self._bundle, params.max_new_tokens, len(ids))
        refuse_foreign_tokens(self._bundle, params)
        for token in params.extra.get("forced_end", ()):
            require_token(token, self._vocab_size, "forced_end")
        if self._bundle.tokenizer.unsaid_ids:
            unsaid = dict.fromkeys(set(self._bundle.tokenizer.unsaid_ids) - {*params.allowed_token_ids}, -math.inf)
            params = replace(params, logit_bias=dict(params.logit_bias) | unsaid)
        eos = () if params.ignore_eos else self._bundle.tokenizer.eos_token_ids
        if (ends := self._bundle.tokenizer.forced_end_ids) and eos and params.grammar is None:
            params = replace(params, extra={**params.extra, "forced_end": ends})
        if params.min_tokens:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *eos))
        banned = params.banned(self._vocab_size)
        if len(banned) == self._vocab_size:
            raise RequestError(f"logit_bias bans all {len(banned)} tokens of the vocabulary; leave at least one")
        if params.min_tokens and len(banned.union(params.stop_token_ids)) == self._vocab_size:
            raise RequestError("min_tokens and logit_bias leave no token to begin with; ask for less")
        predicted = self._encode(prediction, begins=False) if prediction else []
        if predicted and PREDICTING not in str(drafter or PREDICTING).split(BESIDE):
            raise RequestError(
                f"drafter is {drafter!r}, but a prediction is copied by {PREDICTING}; leave one of them out", "drafter"
            )
        if predicted and draft_length is None:
            draft_length = self._rules.longest  # nearly all of it is expected to be accepted
        drafting = self.drafting(draft_length, drafter or (PREDICTING if predicted else None), params)
        return Request(
            ids,
            params,
            frozenset((*params.stop_token_ids, *eos)),
            TextStream(
                self._tokenizer,
                ids,
                params.stop,
                include_stop=params.include_stop,
                show_special_tokens=params.show_special_tokens,
            ),
            drafting,
            self._rules.check,
            self.grammars.guide(params),
            trace=trace,
            on_progress=on_progress,
            cache_salt=cache_salt,
            prediction=predicted or self._copied(read_from, drafting.drafter),
            priority=priority,
            source=read_from,
            forced=self._forced(ids),
            adapter=adapter,
            sight=sight,
        )

    def drafting(self, length: DraftLength | None, drafter: str | None, params: SamplingParams) -> Drafting:
        """Return how such a request drafts, with the defaults for what was left open; refuse what is impossible."""
        if drafter is None and params.num_beams > 1:
            drafter = DraftModel.name if DraftModel.name in self._rules.drafters else NONE
        drafter = drafter or usual_drafter(self._bundle, self._rules.drafters)
        return self._rules.check(self._rules.default(drafter, params) if length is None else length, drafter, params)

    def _forced(self, ids: list[int]) -> int:
        """Return how many tokens of a beginning the model was made to say: all that its own has after the first."""
        own = self._bundle.tokenizer.start_ids
        return len(own) - 1 if ids == [*own] else 0

    def _with_images(
        self, prompt: Prompt, images: Sequence[bytes | Picture], said: int
    ) -> tuple[list[int], Sight | None]:
        """Return the tokens of a prompt with its images in their places, and where these are; nothing without any."""
        if not images:
            return [], None
        refuse_images(self._bundle)
        reader, vision = self.images, self._bundle.vision
        assert reader is not None, "a bundle that sees says how images are read"
        assert vision is not None
        pictures = list[Picture]()
        for number, one in enumerate(images, 1):
            with numbered(number, len(images)):
                pictures.append(one if isinstance(one, Picture) else reader.read(one))
        ids = self._encode(reader.surrounded(prompt, pictures) if isinstance(prompt, str) else prompt)
        own = len(ids) - said
        ids = [*reader.expand(ids[:own], pictures), *ids[own:]]
        return ids, Sight.of(ids, pictures, vision.contract.token, said)

    def _source(self, given: Any) -> Source | None:
        """Read the source of a text; it must be given if the models need it, and only then."""
        refuse_source(self._bundle, given is not None)
        return read_source(given, self._encoders, self._vocab_size, self._tokenizer) if self._encoders else None

    def _beginning(self, prompt: Prompt) -> list[int]:
        """Return what a text with a source begins with: the token ids that are given, or the model's own and text."""
        own = self._bundle.tokenizer.start_ids
        if not isinstance(prompt, str):
            return self._encode(prompt or own)
        return [*own, *(self._encode(prompt, begins=False) if prompt else ())]

    def _copied(self, source: Source | None, drafter: str) -> Sequence[int]:
        """Return what drafter suffix copies of a source of text: outputs often repeat it."""
        return () if source is None or PREDICTING not in drafter.split(BESIDE) else source.ids

    def _encode(self, prompt: object, begins: bool = True) -> list[int]:
        return encode(prompt, self._tokenizer, self._vocab_size, begins)
