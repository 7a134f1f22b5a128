"""The whole way from checkpoints to a bundle: `export_bundle`, and what it does for each model."""

from ..writing.report import ExportReport, ModelReport
from .bundle import export_bundle
from .export import SAMPLE, Progress

__all__ = ["SAMPLE", "ExportReport", "ModelReport", "Progress", "export_bundle"]
