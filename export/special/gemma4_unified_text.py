"""Write the norms and rotations of the Gemma 4 that reads all in one as those of the other."""

from .gemma4_text import ready

__all__ = ["ready"]
