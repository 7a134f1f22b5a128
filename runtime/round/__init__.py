"""One round of speculation, from its proposals to the copy of its results on the host."""
