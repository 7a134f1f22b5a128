"""A string stands for a terminal."""

import io


class Terminal(io.StringIO):
    def isatty(self):
        return True
