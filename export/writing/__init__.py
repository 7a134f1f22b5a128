"""Writes graphs, encoders and the bundle around them."""
