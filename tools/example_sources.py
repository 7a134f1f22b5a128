"""Sources for measuring and certifying: each text has the one that its first token stands for."""

from random import Random
from typing import Any

import torch

from ..engines import Bundle
from ..runtime import Decoder, Request
from ..runtime.sources.log_mel import samples_of

LONGEST = 48  # tokens of a source of text
LOUD = 0.1


def example_source(bundle: Bundle, first_token: int) -> Any:
    """Return random tokens, or noise that fills a window in part; None for a bundle that has no encoder."""
    if bundle.encoder is None:
        return None
    random, contract = Random(first_token), bundle.encoder.contract
    if contract.sound is not None:
        generator = torch.Generator().manual_seed(first_token)
        most = samples_of(contract.sound)
        return LOUD * torch.randn(random.randint(most // 4, most), generator=generator)
    length = random.randint(1, min(LONGEST, contract.longest))
    return [random.randrange(bundle.tokenizer.vocab_size) for _ in range(length)]


class PromptedDecoder(Decoder):
    """A decoder whose requests have what they are given as a prompt for their source, where the encoder reads text."""

    def submit(self, *given: Any, source: Any = None, **more: Any) -> Request:
        encoder = self.bundle.encoder
        if encoder is None or source is not None:
            return super().submit(*given, source=source, **more)
        prompt, *others = given
        if encoder.contract.sound is not None:
            return super().submit((), *others, source=example_source(self.bundle, len(prompt)), **more)
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else [*prompt]
        return super().submit((), *others, source=ids[: encoder.contract.longest], **more)


class SourcedDecoder(Decoder):
    """A decoder whose requests need not say what their source is, nor which adapter they have."""

    adapter: str | None = None

    def submit(self, *given: Any, source: Any = None, **more: Any) -> Request:
        more["adapter"] = more.get("adapter") or self.adapter
        if source is None and self.bundle.encoders:
            prompt = given[0] if given else more.get("prompt", ())
            ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
            source = example_source(self.bundle, ids[0] if ids else 0)
        return super().submit(*given, source=source, **more)
