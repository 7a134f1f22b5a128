"""How each family of checkpoints makes its inputs of an image: one file and one row of the table each."""
