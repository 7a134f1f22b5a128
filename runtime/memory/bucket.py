"""How much of a long cache the steps read: one of a few lengths, each converted and recorded once."""

SHORTEST = 256


def bucket(needed: int, capacity: int) -> int:
    """Return the shortest of 256, 512, 1024, … that holds `needed` entries, at most the capacity."""
    return min(capacity, SHORTEST << ((needed - 1) // SHORTEST).bit_length())
