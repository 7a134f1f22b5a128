"""One schema is asked for as a format, and as what tools take."""

SCHEMA = {"type": "object", "properties": {"n": {"enum": ["a", "b"]}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does it", "parameters": SCHEMA}}
    for name in ("add", "take_away")
]
