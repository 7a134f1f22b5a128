"""The core: who has which row, what a round does, and what its results are."""
