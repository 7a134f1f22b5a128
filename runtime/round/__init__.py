"""One round of speculation and all that it reads, writes, records and reports."""
