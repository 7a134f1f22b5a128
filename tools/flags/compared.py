"""What `bench --compare` runs beside ours: the flags that name it, refused before anything heavy is loaded."""

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path

from ...engines import EngineError, RequestError
from ...runtime.acceptance.parameter_fields import ParameterFields
from ..extras import install_command, installed

PEERS = {"hf": "transformers", "openvino": "OpenVINO GenAI"}
CHECKPOINT_FLAGS = {"target": "--target-checkpoint", "draft": "--draft-checkpoint"}
OPENVINO_FLAGS = {"target": "--openvino-target", "draft": "--openvino-draft"}
OPENVINO_MODEL = "openvino_model.xml"
DRAFTED, LOOKUP = ("model",), "lookup"  # sources of proposals that every peer has
OWN_TOKENS = ("common", "text")  # drafters whose draft has other tokens than the target, which transformers has too


def compared_folders(arguments: argparse.Namespace, drafter: str) -> dict[str, Path]:
    """Return the folders of the models that the peer will run, by role; refuse what would not compare."""
    return FOLDERS[arguments.compare](arguments, drafter)


def _checkpoints(arguments: argparse.Namespace, drafter: str) -> dict[str, Path]:
    _require_package(arguments, "transformers", "export")
    drafted = (*DRAFTED, *OWN_TOKENS)
    named = _named(arguments, drafter, CHECKPOINT_FLAGS, "the checkpoints of the bundle", drafted)
    if arguments.batch > 1:
        raise RequestError(f"--batch is {arguments.batch}, but transformers assists one prompt at a time; use 1")
    from ...export.checkpoints.finding import require_found

    for role, folder in named.items():
        if not folder.exists():
            raise RequestError(f"{CHECKPOINT_FLAGS[role]} {folder} is not there; name the checkpoint's folder")
        require_found(str(folder))
    return named


def _openvino_models(arguments: argparse.Namespace, drafter: str) -> dict[str, Path]:
    _require_package(arguments, "openvino-genai", "compare")
    made = "the bundle's models as `optimum-cli export openvino` makes them"
    named = _named(arguments, drafter, OPENVINO_FLAGS, made, DRAFTED)
    if temperature := getattr(arguments, "temperature", ParameterFields.temperature):
        raise RequestError(
            f"--temperature is {temperature:g}, but OpenVINO GenAI is compared on greedy text, which must be the same; "
            "use 0"
        )
    if arguments.device != "cpu":
        raise RequestError(f"--device is {arguments.device}, but OpenVINO GenAI is compared on the CPU; use cpu")
    for role, folder in named.items():
        if not (folder / OPENVINO_MODEL).is_file():
            raise RequestError(
                f"{OPENVINO_FLAGS[role]} {folder} has no {OPENVINO_MODEL}, expected what `optimum-cli export openvino` "
                "writes; export it so"
            )
    return named


FOLDERS = {"hf": _checkpoints, "openvino": _openvino_models}


def _named(
    arguments: argparse.Namespace, drafter: str, flag: Mapping[str, str], what: str, drafted: Collection[str]
) -> dict[str, Path]:
    """Return the folders that the flags of a peer name; `drafted` are its sources of proposals that have a draft."""
    if drafter not in (sources := [*drafted, LOOKUP]):
        raise RequestError(
            f"--drafter is {drafter}, but --compare {arguments.compare} knows only {' and '.join(sources)}; use one"
        )
    roles = ("target", "draft") if drafter in drafted else ("target",)
    named = {role: getattr(arguments, flag[role].removeprefix("--").replace("-", "_")) for role in roles}
    if missing := [flag[role] for role, path in named.items() if path is None]:
        raise RequestError(f"--compare {arguments.compare} runs {what}; name {' and '.join(missing)}")
    return named


def _require_package(arguments: argparse.Namespace, package: str, extra: str) -> None:
    if installed(package) is None:
        raise EngineError(
            f"--compare {arguments.compare} runs {package}, which is not installed; {install_command(extra)}"
        )
