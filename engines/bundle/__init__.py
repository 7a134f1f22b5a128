"""A bundle on disk: models, tokenizer and a manifest that vouches for every file."""

from .added_files import put_file
from .bundle import Bundle
from .entries import EncoderEntry, Masks, ModelEntry, OwnTokens, Speech, TokenizerEntry, VisionEntry
from .layout import (
    ADAPTED,
    COSTS,
    DRAFT,
    DRAFTS,
    ENCODER,
    FOREIGN,
    FUSED,
    GRAPH,
    HEAD,
    MANIFEST,
    NGRAMS,
    PLANS,
    TABLES,
    TARGET,
    TOKENIZER,
    VISION,
    WEIGHTS,
    shard_folder,
)
from .manifest import graph_identity
from .tables import read_tables, write_tables

__all__ = [
    "ADAPTED",
    "COSTS",
    "DRAFT",
    "DRAFTS",
    "ENCODER",
    "FOREIGN",
    "FUSED",
    "GRAPH",
    "HEAD",
    "MANIFEST",
    "NGRAMS",
    "PLANS",
    "TABLES",
    "TARGET",
    "TOKENIZER",
    "VISION",
    "WEIGHTS",
    "Bundle",
    "EncoderEntry",
    "Masks",
    "ModelEntry",
    "OwnTokens",
    "Speech",
    "TokenizerEntry",
    "VisionEntry",
    "graph_identity",
    "put_file",
    "read_tables",
    "shard_folder",
    "write_tables",
]
