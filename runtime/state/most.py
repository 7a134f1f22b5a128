"""The most proposals that a row may have, each with noise of its own."""

from ...engines import MAX_DRAFT_LENGTH

LINE = MAX_DRAFT_LENGTH + 1  # uniforms of a line's proposals, and of the next token
MOST_CHILDREN = 4  # of one node, counting the line's own
MOST_LINES = 4  # of one row; each further line has uniforms of its own behind those of the first
MOST_BRANCHES = (MOST_LINES - 1) * MAX_DRAFT_LENGTH  # beside a line; each has uniforms of its own there, too
