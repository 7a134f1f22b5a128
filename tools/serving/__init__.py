"""An OpenAI-compatible server over one decoder."""
