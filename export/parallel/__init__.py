"""Splits a target's graph into shards that several devices run side by side (tensor parallel)."""
