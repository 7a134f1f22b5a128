"""Encoder–decoders: an encoder reads a source once, the decoder says its text as any causal model does."""
