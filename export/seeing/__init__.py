"""Targets that see: their vision towers, and their text models with entries of images among the tokens."""
