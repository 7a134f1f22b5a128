"""The key and value caches, and the models that write them."""
