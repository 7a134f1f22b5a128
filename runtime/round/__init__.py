"""One round of speculation, and what it reads, writes, records and reports."""
