"""Drafts whose tokens are not those of their target."""

from .both_ways import COMMON, TEXT, WAYS, BothWays, compare, in_words
from .common import CommonTokens, common_tokens

__all__ = ["COMMON", "TEXT", "WAYS", "BothWays", "CommonTokens", "common_tokens", "compare", "in_words"]
