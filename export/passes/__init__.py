"""Graph rewrites, one a file; each returns how often it fired."""
