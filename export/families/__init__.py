"""Which models can be exported, and what their configurations say of their shapes."""
