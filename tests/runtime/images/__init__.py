"""Images: their files, what vision graphs read of them, and their places in prompts."""
