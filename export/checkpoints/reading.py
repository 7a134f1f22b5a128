"""Read the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from ...engines import ExportError


def read_object(name: str, file: Path) -> dict[str, Any]:
    """Read a JSON object that belongs to a checkpoint."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(
            f"{file.name} of checkpoint {name} cannot be read ({error.strerror}); make it readable"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file.name} of checkpoint {name} is not JSON ({error}); download it again") from error
    if not isinstance(fields, dict):
        raise ExportError(f"{file.name} of checkpoint {name} is not a JSON object; download it again")
    return fields
