"""The rows of live requests, and all that a round reads and writes."""
