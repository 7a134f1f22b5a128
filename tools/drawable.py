"""Whether a chart can be drawn here, before the work that it is to show."""

from importlib import import_module
from pathlib import Path

from ..engines import EngineError, RequestError
from .extras import install_command

FORMATS = (".png", ".svg")


def require_matplotlib() -> None:
    """Refuse what cannot be drawn before the work that is to be drawn."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise EngineError(f"charts are drawn by matplotlib, which is not here; {install_command('report')}") from error


def require_drawable(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise RequestError(f"--plot {path} ends in {path.suffix!r}, expected {' or '.join(FORMATS)}")
    require_matplotlib()
