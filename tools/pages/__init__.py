"""Charts and self-contained HTML pages."""
