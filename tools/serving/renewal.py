"""Reads keys and certificates again at SIGHUP, also while the model loads."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from ssl import SSLContext

from ...engines import RequestError
from .certificates import load_certificate, tls_context
from .keys import Keys

log = logging.getLogger(__name__)


@contextmanager
def renewed(keys: Keys, tls: SSLContext | None, certificate: tuple[Path, Path | None]) -> Iterator[Callable[[], None]]:
    """Give what reads them again, which SIGHUP does during the block; where that fails, they stay as they were."""

    def read_again() -> None:
        try:
            if tls is not None:
                tls_context(*certificate)  # refuses a pair of which one half is new, before any key has changed
            keys.read_again()
            if tls is not None:
                load_certificate(tls, *certificate)
        except RequestError as error:
            log.error("keys and certificates stay as they were: %s", error)
        else:
            log.info("keys and certificates were read again")

    before = signal.signal(signal.SIGHUP, lambda *_: read_again())
    try:
        yield read_again
    finally:
        signal.signal(signal.SIGHUP, before)
