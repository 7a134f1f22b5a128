"""From Hugging Face checkpoints to a bundle: read, refuse, trace, rewrite, write, check."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .pipeline import export_bundle
    from .writing.report import ExportReport, ModelReport

__all__ = ["ExportReport", "ModelReport", "export_bundle"]


def __getattr__(name: str) -> Any:
    """Load the exporter's libraries, which take seconds, when they are needed: compiling a plan needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import pipeline

    return getattr(pipeline, name)
