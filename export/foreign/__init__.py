"""Drafts whose tokens are not those of their target."""

from .both_ways import TEXT, WAYS, BothWays, compare, in_words
from .common import CommonTokens, common_tokens
from .translate import translate

__all__ = ["TEXT", "WAYS", "BothWays", "CommonTokens", "common_tokens", "compare", "in_words", "translate"]
