"""Compile the graphs of a bundle to TensorRT plans, and keep the plans in the bundle.

There is one plan for each role of a model and each GPU generation; what is there already is not compiled again.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...engines import MAX_DRAFT_LENGTH, Contract, Masks
from ...engines.bundle import DRAFT, FOREIGN, HEAD, TARGET, VISION
from ...engines.bundle.manifest import read_manifest
from ..console import in_bytes, progress, table
from ..flags.sampling import LARGEST_BATCH, add_number, positive

if TYPE_CHECKING:
    from ...export.plans.build import BuildReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="the folder that export-models wrote")
    parser.add_argument(
        "--engine",
        required=True,
        choices=("tensorrt", "tensorrt-rtx"),
        help="tensorrt compiles on the GPU that will run the plans; tensorrt-rtx needs no GPU to compile",
    )
    parser.add_argument(
        "--compute-capability",
        nargs="+",
        default=(),
        metavar="X.Y",
        help="GPU generations to compile for (default: that of the GPU here)",
    )
    parser.add_argument(
        "--batch",
        type=batch_range,
        default=(1, 8),
        metavar="N[..M]",
        help="fewest and most requests decoded together (default 1..8)",
    )
    add_number(
        parser, "--draft-length", 4, f"most tokens proposed in a round, 0 to {MAX_DRAFT_LENGTH}", int, letter="K"
    )
    add_number(
        parser,
        "--siblings",
        0,
        "most proposals beside a line of K: of combs, of trees and of several lines",
        int,
        letter="M",
    )
    parser.add_argument(
        "--draft-trees",
        action="store_true",
        help="compile drafts for steps as wide as the target's as well, which trees (4/12 takes --siblings 8, too) and "
        "drafter cascade need; each draft then holds its weights once more",
    )
    parser.add_argument(
        "--prefill-width",
        type=int,
        default=128,
        metavar="N",
        help="tokens of a prompt that one call reads (default 128); 0 leaves prompts to the plans that verify",
    )
    parser.add_argument(
        "--workspace",
        type=positive,
        metavar="MIB",
        help="memory that a plan may use beside weights and cache (default: the library's own)",
    )
    parser.add_argument(
        "--unfused-attention",
        action="store_true",
        help="compile attention in parts where the library has no fused kernel",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def batch_range(text: str) -> tuple[int, int]:
    smallest, dots, largest = text.partition("..")
    try:
        found = int(smallest), int(largest if dots else smallest)
    except ValueError:
        found = (0, LARGEST_BATCH + 1)
    if found[1] > LARGEST_BATCH:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a batch, expected for instance 1 or 1..8, and at most {LARGEST_BATCH}"
        )
    return found


def run(arguments: argparse.Namespace) -> int:
    from ...export.plans.roles import BuildOptions, roles, with_more_of_target

    options = BuildOptions(
        engine=arguments.engine,
        compute_capabilities=arguments.compute_capability,
        batch=arguments.batch,
        draft_length=arguments.draft_length,
        siblings=arguments.siblings,
        draft_trees=arguments.draft_trees,
        prefill_width=arguments.prefill_width,
        workspace=None if arguments.workspace is None else arguments.workspace << 20,
        unfused_attention=arguments.unfused_attention,
    )
    manifest = read_manifest(arguments.bundle)  # build_plans verifies the bundle
    models = manifest["models"]
    drafts = [name for name in models if models[name]["kind"] in (DRAFT, FOREIGN)]
    heads = {name: Contract.from_json(models[name]["contract"]) for name in models if models[name]["kind"] == HEAD}
    masks = {name: Masks(**own) for name in models if (own := models[name].get("masks"))}
    target = Contract.from_json(models[TARGET]["contract"])
    from ...export.plans.build import build_plans

    found = with_more_of_target(roles(options, drafts, heads, masks), target)
    plans = (len(found) + (VISION in manifest)) * max(1, len(options.compute_capabilities))
    with progress("build", total=plans, ticking=True) as show:
        report = build_plans(arguments.bundle, options, show)
    if arguments.json:
        print(json.dumps({"built": report.built, "seconds": report.seconds, "plans": list(map(asdict, report.plans))}))
    else:
        print(_report(report))
    return 0


def _report(report: "BuildReport") -> str:
    rows = [("model", "role", "GPU", "width", "batch", "size", "seconds")]
    sizes: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for plan in report.plans:
        key = plan.key
        sizes[key.model, key.compute_capability].append(plan.bytes)
        batch = "..".join(map(str, sorted(set(key.batch))))
        rows.append(
            (
                key.model,
                plan.role,
                key.compute_capability,
                str(key.width),
                batch,
                in_bytes(plan.bytes),
                f"{plan.build_seconds:.1f}",
            )
        )
    lines = [table(rows, left=3)]
    for (model, capability), each in sizes.items():
        weights = report.bundle.weight_bytes(model)
        lines.append(
            f"{model} on {capability}: {len(each)} plans of {in_bytes(sum(each))}, each with its own copy of "
            f"{in_bytes(weights)} of weights"
        )
    lines.append(
        f"{report.built} of {len(report.plans)} plans compiled in {report.seconds:.1f} s, the others were there"
    )
    return "\n".join(lines)
