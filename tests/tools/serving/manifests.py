"""The commands that the files for Compose and Kubernetes give to their containers."""

from collections.abc import Iterator
from pathlib import Path

import yaml

SERVING = Path(__file__).parents[3] / "tools" / "serving"


def commands_of(module: str) -> list[list[str]]:
    """The flags of every container that runs this module."""
    return [words[3:] for words in _commands() if words[:3] == ["python", "-m", module]]


def _commands() -> Iterator[list[str]]:
    compose = yaml.safe_load((SERVING / "compose.yaml").read_text())
    for service in compose["services"].values():
        yield service["command"].split()
    for document in yaml.safe_load_all((SERVING / "kubernetes.yaml").read_text()):
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                yield [*container["command"], *container["args"]]
