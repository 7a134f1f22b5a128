"""Sources that texts stand behind: text or sound, and the encoders that read them."""
