"""From Hugging Face checkpoints to a bundle: read, refuse, trace, rewrite, write, check."""

from .pipeline import ExportReport, ModelReport, export_bundle

__all__ = ["ExportReport", "ModelReport", "export_bundle"]
