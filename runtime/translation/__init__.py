"""Texts in the tokens of two tokenizers: those of the target, and those of a draft that has others."""
