"""Sources: what encoders read, and the rows of texts that have one."""
