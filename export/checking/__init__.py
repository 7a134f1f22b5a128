"""What a checkpoint itself computes, and whether a written graph computes the same."""
