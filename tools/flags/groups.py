"""The headings under which --help lists flags, so that what most people need comes first."""

import argparse

BASIC, SAMPLING, SPECULATION, LIMITS, ADVANCED = "options", "sampling", "speculation", "limits", "advanced"
GROUPS = (BASIC, SAMPLING, SPECULATION, LIMITS, ADVANCED)


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the group of a parser that has this title, after those that come before it in `GROUPS`."""
    groups = {one.title: one for one in parser._action_groups}
    for one in GROUPS:
        if one not in groups:
            groups[one] = parser.add_argument_group(one)
    return groups[title]
