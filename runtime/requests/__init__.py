"""Requests: each holds what was asked for and what has come out of it."""
