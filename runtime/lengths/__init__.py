"""Chooses how many tokens a round proposes: by measured costs, or by the draft's entropy."""
