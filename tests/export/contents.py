"""What lies in a folder, to see that nothing has changed."""

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
