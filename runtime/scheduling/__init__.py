"""The core: it gives requests rows, plans and launches their rounds, and hands out the results."""
