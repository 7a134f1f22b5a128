"""Calculate how much faster speculation would decode, from the acceptance of proposals and the costs of a round.

The unit of all costs is one target step, which scores one token. trt-spec doctor measures acceptance and cost of two
checkpoints before anything is exported, trt-spec bench those of a bundle.
"""

import argparse
import json
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from ...engines import MAX_DRAFT_LENGTH, WIDEST_STEP, RequestError
from ..console import table, table_of
from ..drawable import require_drawable
from ..flags.sampling import add_number
from ..pages.charts import planned_speed_up, save
from ..theory.lines import best_draft_length, operations_growth, oracle_tokens_per_round, speed_up, tokens_per_round
from ..theory.trees import Comb, GrownTree, combs, grown_tree
from ..whole_file import whole_file

COLUMNS = {
    "K": ("draft_length", ""),
    "tokens/round": ("tokens_per_round", ".2f"),
    "speed-up": ("speed_up", ".2f"),
    "operations": ("operations_growth", ".2f"),
}
TREE_HEADER = ("proposals", "line", "speed-up", "comb", "tokens", "speed-up", "tree", "tokens", "speed-up", "at most")
NODES = 8  # most proposals of a comb or tree, if the user says nothing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alpha",
        type=float,
        required=True,
        metavar="A",
        help="share of examined proposals that are accepted, 0 to 1",
    )
    add_number(parser, "--cost", 0.0, "cost of a draft step, in target steps", float, letter="C")
    add_number(
        parser, "--verify-cost", 1.0, "cost of the pass that verifies K tokens, in target steps", float, letter="V"
    )
    parser.add_argument(
        "--operations",
        type=float,
        metavar="C",
        help="arithmetic of a draft step, as a share of a target step's (default: what --cost says)",
    )
    add_number(parser, "--longest", 8, f"last K of the table, at most {MAX_DRAFT_LENGTH}", int, letter="K")
    parser.add_argument(
        "--siblings",
        type=_shares,
        metavar="B,B,…",
        help="how often the second, third, … of a draft's choices is right where those before it are not, as doctor "
        "measures it; adds a table of combs and trees, and of what no tree of as many proposals exceeds",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help=f"most proposals of a comb or tree, at most {WIDEST_STEP - 1} (default {NODES})",
    )
    parser.add_argument(
        "--node-cost",
        type=float,
        metavar="W",
        help="what each proposal adds to the pass that verifies, in target steps, and to a draft step that reads the "
        "whole tree, in draft steps (default 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw the speed-up over K, into a .png or .svg")


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        require_drawable(arguments.plot)
    operations = arguments.cost if arguments.operations is None else arguments.operations
    found = plan(arguments.alpha, arguments.cost, arguments.verify_cost, operations, arguments.longest)
    nodes, node_cost = arguments.nodes, arguments.node_cost
    if arguments.siblings:
        found["trees"] = plan_trees(found, arguments.siblings, NODES if nodes is None else nodes, node_cost or 0.0)
    elif nodes is not None or node_cost is not None:
        name = "--nodes" if nodes is not None else "--node-cost"
        raise RequestError(f"{name} is about combs and trees; say --siblings, too")
    if arguments.plot:
        with whole_file(arguments.plot) as out:
            save(planned_speed_up(found), [_title(found)], arguments.plot, out)
    print(json.dumps(found) if arguments.json else _report(found))
    return 0


def plan(alpha: float, cost: float, verify_cost: float, operations: float, longest: int) -> dict[str, Any]:
    if not 0 <= alpha <= 1:
        raise RequestError(f"--alpha is {alpha}, expected a share from 0 to 1")
    for name, value, least in (("cost", cost, 0), ("verify-cost", verify_cost, 1), ("operations", operations, 0)):
        if not (isfinite(value) and value >= least):
            raise RequestError(f"--{name} is {value}, expected a number of target steps, at least {least}")
    if not 1 <= longest <= MAX_DRAFT_LENGTH:
        raise RequestError(f"--longest is {longest}, expected 1 to {MAX_DRAFT_LENGTH}")
    settings = [
        {
            "draft_length": k,
            "tokens_per_round": tokens_per_round(alpha, k),
            "speed_up": speed_up(alpha, k, cost, verify_cost),
            "operations_growth": operations_growth(alpha, k, operations),
        }
        for k in range(longest + 1)
    ]
    best = best_draft_length(alpha, cost, MAX_DRAFT_LENGTH, verify_cost)
    return {
        "alpha": alpha,
        "cost": cost,
        "verify_cost": verify_cost,
        "settings": settings,
        "best_draft_length": best,
        "best_speed_up": speed_up(alpha, best, cost, verify_cost),
        "oracle_tokens_per_round": None if alpha == 1 else oracle_tokens_per_round(alpha),
    }


def plan_trees(found: dict[str, Any], siblings: list[float], nodes: int, node_cost: float) -> list[dict[str, Any]]:
    """Compare, for each number of proposals, a line with the best comb and the best tree of as many."""
    ranks = [found["alpha"], *siblings]
    if not (sum(ranks) <= 1 + 1e-9 and all(a >= b for a, b in pairwise([*ranks, 0.0]))):
        raise RequestError(
            f"--alpha and --siblings are {ranks}, expected shares that do not rise and add up to at most 1"
        )
    if not 1 <= nodes < WIDEST_STEP:
        raise RequestError(f"--nodes is {nodes}, expected 1 to {WIDEST_STEP - 1}")
    if not (isfinite(node_cost) and node_cost >= 0):
        raise RequestError(f"--node-cost is {node_cost}, expected a number of target steps, at least 0")

    def faster(tokens: float, draft_steps: float, count: int) -> float:
        return tokens / float(found["cost"] * draft_steps + found["verify_cost"] + node_cost * count)

    def faster_comb(comb: Comb) -> float:
        return faster(comb.tokens, comb.length, comb.length + comb.siblings)

    def faster_grown(tree: GrownTree) -> float:
        """Each draft step after the first reads the whole tree."""
        return faster(tree.tokens, 1 + (tree.depth - 1) * (1 + node_cost * len(tree.parents)), len(tree.parents))

    rows = []
    for count in range(1, nodes + 1):
        own = combs(ranks, count, MAX_DRAFT_LENGTH)
        whole = max(one.length + one.siblings for one in own)  # less than `count` if no more are ever accepted
        comb = max((one for one in own if one.length + one.siblings == whole), key=faster_comb)
        bound = grown_tree(ranks, count, MAX_DRAFT_LENGTH)
        trees = [grown_tree(ranks, count, depth) for depth in range(1, bound.depth + 1)]
        tree = max((one for one in trees if len(one.parents) == len(bound.parents)), key=faster_grown)
        row: dict[str, Any] = {"proposals": count, "most_tokens": bound.tokens}
        row |= {"comb": str(comb), "comb_tokens": comb.tokens, "comb_speed_up": faster_comb(comb)}
        row |= {"tree": str(tree), "tree_tokens": tree.tokens, "tree_speed_up": faster_grown(tree)}
        if count <= MAX_DRAFT_LENGTH:
            line = tokens_per_round(ranks[0], count)
            row |= {"line_tokens": line, "line_speed_up": faster(line, count, count)}
        rows.append(row)
    return rows


def _title(found: dict[str, Any]) -> str:
    return (
        f"Speculation as calculated: acceptance α = {found['alpha']:.3g}; in target steps, a draft step costs "
        f"c = {found['cost']:.3g} and a verify pass {found['verify_cost']:.3g}"
    )


def _report(found: dict[str, Any]) -> str:
    best, oracle = found["best_draft_length"], found["oracle_tokens_per_round"]
    advice = f"best K up to {MAX_DRAFT_LENGTH}: {best}, {found['best_speed_up']:.2f} × as fast as without a draft"
    bound = "no bound on tokens a round" if oracle is None else f"at most {oracle:.2f} tokens a round, whatever K"
    lines = [
        table_of(found["settings"], COLUMNS, left=0),
        f"{advice if best else 'no K pays: decode without a draft'}; {bound}",
    ]
    return "\n".join(lines + _trees(found.get("trees", [])))


def _trees(trees: list[dict[str, Any]]) -> list[str]:
    if not trees:
        return []
    rows = [
        (
            str(one["proposals"]),
            *((f"{one[name]:.2f}" if name in one else "-") for name in ("line_tokens", "line_speed_up")),
            one["comb"],
            f"{one['comb_tokens']:.2f}",
            f"{one['comb_speed_up']:.2f}",
            one["tree"],
            *(f"{one[name]:.2f}" for name in ("tree_tokens", "tree_speed_up", "most_tokens")),
        )
        for one in trees
    ]
    line = max((one for one in trees if "line_speed_up" in one), key=lambda one: one["line_speed_up"])
    comb, tree = (max(trees, key=lambda one: one[f"{name}_speed_up"]) for name in ("comb", "tree"))
    return [
        "",
        table([TREE_HEADER, *rows], left=0),
        f"best line: {line['proposals']}, {line['line_speed_up']:.2f} ×; best comb: {comb['comb']}, "
        f"{comb['comb_speed_up']:.2f} ×; best tree: {tree['tree']}, {tree['tree_speed_up']:.2f} ×",
    ]


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, expected shares like .15,.06") from None
