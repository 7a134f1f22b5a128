"""The error of a cache that cannot grow."""

from ...engines import EngineError


class CacheFull(EngineError):
    """A cache cannot grow; what it held is as it was."""
