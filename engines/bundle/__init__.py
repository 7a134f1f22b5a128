"""A bundle on disk: models, tokenizer and a manifest that vouches for every file."""

from .added_files import put_file
from .bundle import (
    COSTS,
    DRAFT,
    DRAFTS,
    FORMAT,
    GRAPH,
    MANIFEST,
    PLANS,
    TARGET,
    WEIGHTS,
    Bundle,
    ModelEntry,
    TokenizerEntry,
    content_hash,
    graph_identity,
)

__all__ = [
    "COSTS",
    "DRAFT",
    "DRAFTS",
    "FORMAT",
    "GRAPH",
    "MANIFEST",
    "PLANS",
    "TARGET",
    "WEIGHTS",
    "Bundle",
    "ModelEntry",
    "TokenizerEntry",
    "content_hash",
    "graph_identity",
    "put_file",
]
