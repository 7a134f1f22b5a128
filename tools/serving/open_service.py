"""Puts a service together from an open decoder."""

from ...runtime import Decoder
from .metrics import Metrics
from .service import Service
from .stepper import Stepper
from .templates import ChatTemplate
from .tokens import Spelling


def open_service(
    decoder: Decoder, max_waiting: int = 256, name: str | None = None, chat_template: str | None = None
) -> Service:
    """Make a service; `chat_template` takes the place of the bundle's own."""
    bundle = decoder.bundle
    name = name or bundle.target.name
    source = chat_template or bundle.tokenizer.chat_template
    metrics = Metrics(name)
    stepper = Stepper(decoder, max_waiting, metrics.count)
    metrics.watch(stepper, name)
    template = None if source is None else ChatTemplate(source, decoder.tokenizer, bundle.tokenizer)
    return Service(decoder, stepper, Spelling(decoder.tokenizer, bundle.tokenizer_file), template, name, metrics)
