"""Sources of texts: text or sound, and the encoders that read them."""
