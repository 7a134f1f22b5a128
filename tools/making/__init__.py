"""Make checkpoints, drafts, n-gram tables and the demo bundle."""
