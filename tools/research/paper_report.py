"""Print the tables of Leviathan et al.: calculated, theirs, and measured here.

python -m trt_spec.tools.research.paper_report [--json]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..console import table_of
from ..program import program
from .paper_tables import FREE, LENIENCES, LENIENT_COST, paper

RUN = {
    "task": ("task", ""),
    "draft": ("draft", ""),
    "temperature": ("temperature", "g"),
    "K": ("draft_length", ""),
    "α": ("alpha", ".2f"),
    "c": ("c", ".2f"),
    "calculated": ("speed", ".2f"),
    "expected there": ("paper_expected", ".1f"),
    "measured there": ("paper_measured", ".1f"),
    "best K": ("best_draft_length", ""),
    "speed": ("best_speed", ".2f"),
}
OUR_RUN = {
    "temperature": ("temperature", "g"),
    "K": ("draft_length", ""),
    "α": ("alpha", ".2f"),
    "c": ("c", ".2f"),
    "v": ("v", ".2f"),
    "tokens a round": ("tokens_per_round", ".2f"),
    "calculated": ("speed", ".2f"),
    "with v": ("predicted", ".2f"),
    "measured here": ("measured", ".2f"),
}
ALPHA = {
    "target": ("target", ""),
    "draft": ("draft", ""),
    "temperature 0": ("alpha_0", ".2f"),
    "temperature 1": ("alpha_1", ".2f"),
    f"speed, K = {FREE}, c = 0": ("speed", ".2f"),
}
TRADE = {
    "α": ("alpha", ""),
    "K": ("draft_length", ""),
    "speed": ("speed", ".2f"),
    "there": ("paper_speed", ".2f"),
    "operations": ("operations", ".2f"),
    "there ": ("paper_operations", ".2f"),
}
LENIENT_SPEED = {
    "lenience": ("lenience", ""),
    "α": ("alpha", ".2f"),
    "best K": ("best_draft_length", ""),
    "calculated": ("best_speed", ".2f"),
    "there": ("paper_speed", ".1f"),
}


LENIENT = {"target": ("target", ""), "draft": ("draft", "")} | {
    f"l = {one:g}": (f"lenience_{one:g}", ".2f") for one in LENIENCES
}
ABOUT = """\
Leviathan, Kalman and Matias: Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192).
Its γ is K here. `there` is what the paper says, and so are its α of T5-XXL, GPT-like and LaMDA;
the rest is calculated or was measured here. Speeds and operations are multiples of those without a draft."""
TITLE = "the shipped T5, whose decoder is 36 layers deep here and says the same, on one core"
WHY_SPEED = """\
The formula takes the pass that verifies for one step. A CPU has no arithmetic to spare for it: it costs v steps, and
`with v` allows for that. Misses come together, so that a round makes fewer tokens than if they were independent;
what the host does for a round is saved with the rounds. Other work shared the machine, so that v and c differ from
run to run."""
WHY_ALPHA = """\
Our targets are tiny. One that is unsure, as on Python, has a flat distribution at temperature 1, and even a unigram
overlaps with that. Both T5 are kin, since one began as the other, so that α is higher than the paper's; on long
sentences, which the speeds above are of, they agree less. N-grams were counted on sources and docstrings of the
standard
library, and α on 1,300 to 1,800 tokens a row, where the paper has 10,000."""


def paper_report(found: Mapping[str, Any]) -> str:
    ours = found["ours"]
    return "\n\n".join(
        [
            ABOUT,
            _part("Table 1: speed and operations with c = ĉ = 0", table_of(found["table_1"], TRADE, 0)),
            _part("Tables 2 and 4: T5-XXL on a TPU", table_of(found["tables_2_and_4"], RUN, 2)),
            _part(f"The same of {TITLE}", table_of(ours["tables_2_and_4"], OUR_RUN, 0), WHY_SPEED),
            _part("Table 3: α", table_of([*found["table_3"], *ours["table_3"]], ALPHA, 2), WHY_ALPHA),
            _part(
                "Table 5: α by lenience at temperature 1", table_of([*found["table_5"], *ours["table_5"]], LENIENT, 2)
            ),
            _part(
                f"What lenience brings T5-small at best with c = {LENIENT_COST}",
                table_of(found["table_5_speed"], LENIENT_SPEED, 0),
                "The paper's speeds are higher than its own α and c give; it does not say how they were found.",
            ),
            _part(
                "Figures 2 and 4: tokens a round, which with c = 0 are the speed, by α and K",
                _curves(found["figures_2_and_4"], ".2f"),
            ),
            _part("Figure 3: the best K, by α and c", _curves(found["figure_3"], "")),
            _part("Figure 4: operations with ĉ = 0, by α and K", _curves(found["figure_4"], ".2f")),
        ]
    )


def _part(title: str, *lines: str) -> str:
    return "\n".join((title, *lines))


def _curves(points: Sequence[Mapping[str, Any]], form: str) -> str:
    """Make a table of a figure: α on the left, a curve in each column."""
    columns = {"α": ("alpha", "")} | {name: (name, form) for name in points[0] if name != "alpha"}
    return table_of(points, columns, left=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    tables = paper()
    print(json.dumps(tables) if arguments.json else paper_report(tables))
    return 0


main = program("paper_report", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
