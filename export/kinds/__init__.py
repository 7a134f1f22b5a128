"""The kinds of heads: how each is recognised, read, traced and checked; to add one, write a file and add it here."""
