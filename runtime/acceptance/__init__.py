"""Turns logits into tokens: the request's parameters, the transform, the noise, and the exact tests."""
