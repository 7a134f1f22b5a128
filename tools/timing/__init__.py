"""Timings of rounds and of their steps, ours and those of another runtime."""
