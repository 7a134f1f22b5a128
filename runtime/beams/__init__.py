"""Beam search whose tokens a draft proposes; the results are those of transformers' beam search."""
