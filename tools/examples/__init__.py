"""Short scripts to begin from; each takes the path of a bundle."""
