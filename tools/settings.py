"""Values of flags from environment variables and from a file; those on the command line come before both."""

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from ..engines import RequestError
from ..engines.errors import one_line
from .text_files import read_text

CONFIG = "config"
CONFIG_HELP = (
    "a YAML file of flags, such as max-batch: 16; an environment variable, such as TRT_SPEC_MAX_BATCH=16, comes before "
    "it, and the command line before both"
)
GUARDS = (  # flags that protect: empty they are refused
    "api-key",
    "api-key-file",
    "ssl-certfile",
    "ssl-keyfile",
    "requests-per-minute",
    "rows-per-key",
)
OWN = ("help", "version", CONFIG)  # flags that the command line alone has
LINK = ("tcp://", "udp://")  # what Kubernetes puts into TRT_SPEC_PORT for a service that is called trt-spec
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

Actions = Mapping[str, argparse.Action]  # by the names of their flags, without dashes


class Given(NamedTuple):
    """The value of a flag, and the source that a message names."""

    action: argparse.Action
    name: str
    source: str
    value: Any

    def arguments(self) -> list[str]:
        """Return what says the same on a command line."""
        if self.action.nargs == 0:
            if not isinstance(self.value, str) or self.value.lower() not in (*YES, *NO):
                raise RequestError(f"{self.source} is {self.value!r}, expected true or false")
            return [f"--{self.name}"] if self.value.lower() in YES else []
        if isinstance(self.value, str):
            return [f"--{self.name}={self.value}"]
        if not isinstance(self.action, argparse._AppendAction):
            raise RequestError(f"{self.source} is a list, expected one value")
        return [f"--{self.name}={one}" for one in self.value]


def given_elsewhere(actions: Sequence[argparse.Action], argv: Sequence[str]) -> list[Given]:
    """Return what environment and file set, and the command line does not."""
    named = {flag.removeprefix("--"): action for action in actions for flag in action.option_strings}
    named |= {action.dest: action for action in actions if action.metavar == action.dest.upper()}  # positional
    words = [word.removeprefix("--").partition("=")[0] for word in argv if word.startswith("--")]
    said = {named[word] for word in words if word in named}
    found: list[Given] = []
    for source in (_environment(named), _file(named, argv)):
        new = [one for one in source if one.action not in said]
        said |= {one.action for one in new}
        found += new
    return found


def _environment(named: Actions) -> list[Given]:
    """A variable that is empty says nothing, so that compose files can hand on what may be unset.

    But where it was meant to protect, nothing would: then it is a value, which its flag refuses.
    """
    found = []
    for name, action in named.items():
        variable = f"TRT_SPEC_{name.upper().replace('-', '_')}"
        value = os.environ.get(variable)
        if value is None or name in OWN or value.startswith(LINK):
            continue
        if value or name in GUARDS:
            found.append(Given(action, name, variable, value))
    return found


def _file(named: Actions, argv: Sequence[str]) -> list[Given]:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(f"--{CONFIG}", nargs="?", default=os.environ.get("TRT_SPEC_CONFIG"))
    if not (path := finder.parse_known_args(argv)[0].config):
        return []
    found = []
    for key, value in _read(path).items():
        name = key.removeprefix("--").replace("_", "-")
        if name not in named or name in OWN:
            near = get_close_matches(name, named, 1)
            raise RequestError(
                f"{path} sets {key}, which is no flag; {f'is it {near[0]}?' if near else 'leave it out'}"
            )
        if isinstance(value, dict) or (isinstance(value, list) and not all(isinstance(one, str) for one in value)):
            raise RequestError(f"{path} sets {key} to a structure, expected a value, or a list of values")
        if value or name in GUARDS:
            found.append(Given(named[name], name, f"{key} in {path}", value or ""))
    return found


def _read(path: str) -> dict[str, Any]:
    import yaml

    example = "write a flag on each line, as max-batch: 16"
    try:
        settings = yaml.load(read_text(Path(path), "the file of settings"), yaml.BaseLoader)  # which makes text of all
    except (yaml.YAMLError, RecursionError) as error:
        raise RequestError(f"{path} is not YAML ({one_line(error)}); {example}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise RequestError(f"{path} holds no settings; {example}")
    return settings
