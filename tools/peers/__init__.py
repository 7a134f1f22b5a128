"""Other runtimes that bench can measure in turn with this one; nothing but bench and the reports opens them."""
