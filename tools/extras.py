"""The package's optional extras, read from its own metadata: which packages each needs and how to get them."""

import re
from importlib.metadata import PackageNotFoundError, requires, version

PACKAGE = "trt-spec"
REQUIREMENT = re.compile(r"""^(?P<name>[\w.-]+).*?(?:extra == ['"](?P<extra>[\w.-]+)['"])?$""")


def requirements() -> dict[str | None, list[str]]:
    """Names of the packages that each extra needs; the key None has those that are always needed."""
    by_extra: dict[str | None, list[str]] = {}
    for line in requires(PACKAGE) or []:
        found = REQUIREMENT.match(line)
        assert found is not None
        by_extra.setdefault(found["extra"], []).append(found["name"])
    return by_extra


def installed(package: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    return f"pip install '{PACKAGE}[{extra}]'"
