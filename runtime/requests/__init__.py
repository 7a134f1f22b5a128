"""What a request asks for, and what comes out of it."""
