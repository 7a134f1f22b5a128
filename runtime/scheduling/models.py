"""The models of a decoder: an engine each, and a cache, in the memory that all of them may take together."""

from functools import partial

from tokenizers import Tokenizer

from ...engines import BLOCK_TOKENS, Bundle, Contract, Engine
from ..drafters import ForeignDraft
from ..memory.adapter_pool import AdapterPool, rooms_of
from ..memory.budget import SPREAD, tokens_in
from ..memory.features import Features
from ..memory.image_rows import ImageRows
from ..memory.model import Model
from ..sources.encoder import Encoder
from ..sources.eyes import Eyes
from .opening import Engines

OF_IMAGES = 8  # the part of what is kept that is for images


class Models:
    def __init__(
        self,
        bundle: Bundle,
        engines: Engines,
        max_rows: int,
        cache_bytes: int | None,
        prefix_bytes: int | None,
    ) -> None:
        self._bundle, self._with_adapters = bundle, False
        own, others = engines.models[: len(bundle.names)], engines.models[len(bundle.names) :]
        encoders, eyes = engines.encoders, engines.eyes
        contracts = [one.contract for one in own]
        longest = [bundle.longest_source(name) for name in bundle.names]
        spread = SPREAD * [one.contract for one in others]
        sources = [*longest, *[0] * len(spread)]
        self.most_tokens = tokens_in([*contracts, *spread], cache_bytes, "cache_bytes", max_rows, sources=sources)
        kept = (tokens_in(contracts, prefix_bytes, "prefix_bytes", kept=True) or 0) // BLOCK_TOKENS
        self.kept_blocks = kept // 2 if encoders else kept  # the other half is for the texts of sources
        if eyes is not None:
            self.kept_blocks -= kept // OF_IMAGES
        make = partial(
            Model,
            vocab_size=bundle.tokenizer.vocab_size,
            max_rows=max_rows,
            capacity=bundle.capacity,
            most_tokens=self.most_tokens,
            kept_blocks=self.kept_blocks,
        )
        self.adapters, device = None, own[0].device
        if contracts[0].adapters is not None:
            self.adapters = AdapterPool(rooms_of(bundle), own[0], max_rows)
        self.images = ImageRows(contracts[0], device, max_rows) if bundle.vision is not None else None
        self.target = target = make(own[0], longest_source=longest[0], adapters=self.adapters, images=self.images)
        self.drafts = tuple(
            make(
                engine,
                features=Features(target.cache, bundle.features(name)) if name in bundle.heads else None,
                masks=bundle.models[name].masks,
                longest_source=source,
                images=self._images_of(engine.contract),
            )
            for name, engine, source in zip(bundle.names[1:], own[1:], longest[1:], strict=True)
        )
        self.named = dict(zip(bundle.names, (target, *self.drafts), strict=True))
        self.with_own_tokens = [self._with_own_tokens(bundle, one, max_rows) for one in others]
        self.all = [target, *self.drafts, *self.with_own_tokens]
        of_sources = (prefix_bytes or 0) // 2 // max(1, len(encoders))
        self.encoders = [
            Encoder(engine, bundle.encoders[name].contract, self.named, of_sources, self.adapters)
            for name, engine in encoders.items()
        ]

        self.eyes: Eyes | None = None
        if eyes is not None and self.images is not None and bundle.vision is not None:
            self.eyes = Eyes(eyes, bundle.vision.contract, self.images, (prefix_bytes or 0) // OF_IMAGES)

    def open_adapters(self) -> None:
        """Open the graphs that have room for adapters, unless they are open."""
        if self._with_adapters:
            return
        self._bundle.require_same()
        self.target.engine.open_adapters()
        for encoder in self.encoders:
            encoder.open_adapters()
        self._bundle.require_same()
        self._with_adapters = True

    def _images_of(self, draft: Contract) -> ImageRows | None:
        return self.images.for_draft(draft) if self.images is not None and draft.image_size else None

    def _with_own_tokens(self, bundle: Bundle, engine: Engine, max_rows: int) -> Model:
        """Make the model of a draft that has tokens of its own, and so a cache of another length."""
        assert bundle.foreign is not None
        return Model(
            engine,
            bundle.vocab_size(bundle.foreign),
            max_rows,
            bundle.capacity_of(bundle.foreign),
            most_tokens=None if self.most_tokens is None else SPREAD * self.most_tokens,
            own_tokens=True,
        )

    def foreign_draft(self, bundle: Bundle, tokenizer: Tokenizer) -> ForeignDraft | None:
        """Return the draft that has tokens of its own, if there is one."""
        limited = self.most_tokens is not None
        return next((ForeignDraft.open(bundle, one, tokenizer, limited) for one in self.with_own_tokens), None)
