"""Encoder–decoders: an encoder reads a source once, the decoder says a text behind it as any causal model does."""
