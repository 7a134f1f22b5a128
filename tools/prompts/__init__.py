"""The prompts that are shipped."""
