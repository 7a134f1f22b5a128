"""Reads checkpoints: their files, weights, adapters and tokenizers."""
