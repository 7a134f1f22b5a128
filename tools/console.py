"""Tables and sizes for people to read."""

from collections.abc import Sequence

UNITS = ("B", "KB", "MB", "GB", "TB")


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns two spaces apart; the first `left` of them begin, the others end at one line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def in_bytes(size: float) -> str:
    """Three digits and a decimal unit."""
    unit = 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}"
