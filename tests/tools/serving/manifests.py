"""The files that a server is deployed by: the commands in them, and what stands around those."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[3] / "tools" / "serving" / "deploy"
PAGE = (DEPLOY / "README.md").read_text(encoding="utf-8")


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def commands_of(module: str) -> list[list[str]]:
    """The flags of every container behind Dynamo that runs this module."""
    return [words[3:] for words in _dynamo_commands() if words[:3] == ["python", "-m", module]]


def _dynamo_commands() -> Iterator[list[str]]:
    for service in read_yaml("dynamo/compose.yaml")["services"].values():
        yield service["command"].split()
    for document in yaml.safe_load_all((DEPLOY / "dynamo" / "kubernetes.yaml").read_text(encoding="utf-8")):
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                yield [*container["command"], *container["args"]]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, each on one line."""
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = re.sub(r"\\\n\s*", "", "\n".join(line for line in lines if not line.startswith("#")))
    return [(one.split()[0], one.split(maxsplit=1)[1]) for one in text.splitlines() if one]


def instruction(name: str) -> str:
    """The last of this name, which is the one that counts."""
    return [said for found, said in instructions() if found == name][-1]


def health_check() -> list[str]:
    words: list[str] = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    return words


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit, each with every value that it is given."""
    found: dict[str, list[str]] = {}
    lines = (DEPLOY / "trt-spec.service").read_text(encoding="utf-8").splitlines()
    text = re.sub(r"\\\n\s*", "", "\n".join(line for line in lines if not line.startswith("#")))
    for line in text.splitlines():
        if line and not line.startswith("["):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def served_by() -> dict[str, list[str]]:
    """How each file starts the server, without the program's name."""
    return {
        "Dockerfile": json.loads(instruction("CMD")),
        "compose.yaml": read_yaml("compose.yaml")["services"]["server"]["command"],
        "trt-spec.service": shlex.split(unit()["ExecStart"][0])[1:],
    }


def seconds(text: str) -> float:
    """Of 60, 60s or 5m."""
    number, letter = re.fullmatch(r"(\d+)([smh]?)", text).groups()
    return float(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[letter]


def table(heading: str) -> list[list[str]]:
    """The rows of a table of the page, by the first cells of its heading, without marks of code."""
    rows = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
