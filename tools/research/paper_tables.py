"""The tables and figures of the paper that speculative decoding comes from: what can be calculated, beside its numbers.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192.
Its γ is K here. What is measured here is beside it: `research.paper` writes the file that it comes from.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..theory.lines import best_draft_length, operations_growth, speed_up, tokens_per_round

OURS = Path(__file__).parent / "paper.json"  # what research.paper has measured
TRADE = (  # table 1: α, K, growth of operations, speed; with c = ĉ = 0
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)
RUNS = (  # tables 2 and 4 of T5-XXL: task, draft, temperature, K, α, c, speed as expected there and as measured there
    ("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    ("EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    ("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    ("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    ("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    ("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    ("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    ("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    ("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    ("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    ("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    ("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)
ALPHAS = (  # table 3: target, draft, α at temperature 0 and at 1
    ("GPT-like 97M", "unigram", 0.03, 0.03),
    ("GPT-like 97M", "bigram", 0.05, 0.05),
    ("GPT-like 97M", "GPT-like 6M", 0.88, 0.89),
    ("T5-XXL, EnDe", "unigram", 0.08, 0.07),
    ("T5-XXL, EnDe", "bigram", 0.20, 0.19),
    ("T5-XXL, EnDe", "T5-small", 0.75, 0.62),
    ("T5-XXL, EnDe", "T5-base", 0.80, 0.68),
    ("T5-XXL, EnDe", "T5-large", 0.82, 0.71),
    ("T5-XXL, CNNDM", "unigram", 0.13, 0.08),
    ("T5-XXL, CNNDM", "bigram", 0.23, 0.16),
    ("T5-XXL, CNNDM", "T5-small", 0.65, 0.53),
    ("T5-XXL, CNNDM", "T5-base", 0.73, 0.55),
    ("T5-XXL, CNNDM", "T5-large", 0.74, 0.56),
    ("LaMDA 137B", "LaMDA 100M", 0.61, 0.57),
    ("LaMDA 137B", "LaMDA 2B", 0.71, 0.71),
    ("LaMDA 137B", "LaMDA 8B", 0.75, 0.74),
)
LENIENCES = (1.0, 0.5, 0.3, 0.1)
LENIENT = (  # table 5, at temperature 1: target, draft, α by lenience
    ("T5-XXL, EnDe", "unigram", 0.07, 0.10, 0.11, 0.16),
    ("T5-XXL, EnDe", "bigram", 0.19, 0.23, 0.25, 0.32),
    ("T5-XXL, EnDe", "T5-small", 0.62, 0.71, 0.76, 0.84),
    ("T5-XXL, EnDe", "T5-base", 0.68, 0.80, 0.83, 0.90),
)
LENIENT_COST, LENIENT_SPEED = 0.015, (2.5, 3.1, 3.6, 5.0)  # c, and the speed by lenience, of T5-small
PLOTTED = tuple(step / 10 for step in range(1, 10))  # α of the figures
LENGTHS = (1, 2, 3, 5, 7, 10)  # K of the figures
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2)  # c of figure 3
LONGEST = 100  # K that is considered
FREE = 3  # K at which drafts without cost are compared


def paper() -> dict[str, Any]:
    """Calculate what can be, and read what was measured here."""
    ours = json.loads(OURS.read_text(encoding="utf-8"))
    pairs = ours["telegrams"], ours["pycode"]
    return {
        "table_1": [
            {"alpha": alpha, "draft_length": k, "speed": speed_up(alpha, k, 0), "paper_speed": speed}
            | {"operations": operations_growth(alpha, k, 0), "paper_operations": operations}
            for alpha, k, operations, speed in TRADE
        ],
        "tables_2_and_4": [_run(*one) for one in RUNS],
        "table_3": [_alphas(*one) for one in ALPHAS],
        "table_5": [_lenient(*one) for one in LENIENT],
        "table_5_speed": [
            {"lenience": lenience, "alpha": alpha, "paper_speed": speed} | _best(alpha, LENIENT_COST)
            for lenience, alpha, speed in zip(LENIENCES, LENIENT[2][2:], LENIENT_SPEED, strict=True)
        ],
        "figures_2_and_4": _plotted(LENGTHS, tokens_per_round),  # with c = 0 the speed, too
        "figure_3": _plotted(COSTS, lambda alpha, c: best_draft_length(alpha, c, LONGEST)),
        "figure_4": _plotted(LENGTHS, lambda alpha, k: operations_growth(alpha, k, 0)),
        "ours": {
            "tables_2_and_4": ours["runs"],
            "table_3": [_alphas(*one) for pair in pairs for one in pair["alphas"]],
            "table_5": [_lenient(*one) for pair in pairs for one in pair["lenient"]],
            "conditions": ours["conditions"],
        },
    }


def _plotted(curves: Sequence[float], value: Callable[[float, Any], Any]) -> list[dict[str, Any]]:
    """Return the points of a figure over α, one for each curve."""
    return [{"alpha": alpha, **{f"{curve:g}": value(alpha, curve) for curve in curves}} for alpha in PLOTTED]


def _run(
    task: str, draft: str, temperature: int, k: int, alpha: float, c: float, expected: float, measured: float
) -> dict[str, Any]:
    return {
        "task": task,
        "draft": draft,
        "temperature": temperature,
        "draft_length": k,
        "alpha": alpha,
        "c": c,
        "speed": speed_up(alpha, k, c),
        "paper_expected": expected,
        "paper_measured": measured,
    } | _best(alpha, c)


def _alphas(target: str, draft: str, greedy: float, sampled: float) -> dict[str, Any]:
    free = {"speed": speed_up(greedy, FREE, 0)} if draft.endswith("gram") else {}
    return {"target": target, "draft": draft, "alpha_0": greedy, "alpha_1": sampled} | free


def _lenient(target: str, draft: str, *alphas: float) -> dict[str, Any]:
    return {
        "target": target,
        "draft": draft,
        **{f"lenience_{lenience:g}": alpha for lenience, alpha in zip(LENIENCES, alphas, strict=True)},
    }


def _best(alpha: float, c: float) -> dict[str, Any]:
    k = best_draft_length(alpha, c, LONGEST)
    return {"best_draft_length": k, "best_speed": speed_up(alpha, k, c)}
