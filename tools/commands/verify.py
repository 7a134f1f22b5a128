"""Certify that a bundle, in an engine on this machine, says just what its target alone would say.

Exit code 1 when a check fails: the distribution of what is sampled, the same text for every draft length, drafter,
batch and engine, caches after rollback, what request parameters mean, and, with --checkpoint, the export.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

from ...engines import Bundle, RequestError
from ...engines.bundle import TARGET
from ...runtime.scheduling.engine_choice import resolve
from ..certificate import checkpoint, distribution, rollback, same_text, semantics
from ..certificate.effort import FULL, QUICK, Effort
from ..certificate.probe import Probes
from ..certificate.subject import Finding, Progress, Subject
from ..certificate.time_left import TimeLeft
from ..console import in_time, table
from ..flags.engine import add_engine_flags, engine_name
from ..flags.sampling import positive
from ..whole_file import whole_file

CLAIMS = {
    "checkpoint": "the exported target computes what its checkpoint computes in transformers",
    "same text": "with any drafter, any line, comb or tree of proposals, and any batch a request gets, token for "
    "token, what it gets alone without speculation; a near tie is two tokens whose scores lie closer than the engine "
    "rounds, so that either may win",
    "semantics": "stop rules, penalties, filters and log-probabilities mean what they mean without speculation",
    "rollback": "after rejected proposals, in lines, combs and trees, the caches hold what they would hold had nothing "
    "been proposed, and recurrent layers have swallowed just that, also of prompts that are read side by side or found "
    "kept; what is planted in these must be caught",
    "distribution": "sampled tokens are distributed as the target's own (χ² against exact probabilities, or, of trees "
    "under rule coupled, each sample against what exact scores and its seed's noise say). A case runs in the engine "
    "throughout, or its target recalls what the engine has said after the same context. Each planted fault must be "
    "caught, or the check itself would be worth nothing",
}
CHECKS = tuple(name.replace(" ", "-") for name in CLAIMS)
BATCH = 64
AGAIN = 10.0  # seconds between two lines of one stage
RESULTS = {True: "pass", False: "FAIL", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="made by export-models")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="what the bundle's target was exported from")
    parser.add_argument(
        "--only", action="append", choices=CHECKS, help="run this check, not all of them; may be repeated"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="take a minute for a pair like the demo's, not minutes: total variation "
        f"{QUICK.total_variation:g}; left out are {', '.join(QUICK.left_out)}",
    )
    parser.add_argument(
        "--batch", type=positive, default=BATCH, metavar="N", help=f"the most rows decoded together (default {BATCH})"
    )
    parser.add_argument(
        "--total-variation",
        type=_share,
        metavar="X",
        help=f"the share of probability that a fault has to move to be caught with power {distribution.POWER:g}; "
        f"samples grow with its inverse square (default {FULL.total_variation:g})",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was found to this file, too")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    began = perf_counter()
    if arguments.checkpoint is None and "checkpoint" in (arguments.only or ()):
        raise RequestError("--only checkpoint needs --checkpoint DIR; name what the bundle was exported from")
    effort = QUICK if arguments.quick else FULL
    effort = effort.catching(arguments.total_variation or effort.total_variation)
    with ExitStack() as stack:
        out = stack.enter_context(whole_file(arguments.json)) if arguments.json else None
        bundle = Bundle.open(arguments.bundle)
        engine = resolve(bundle, engine_name(arguments), arguments.device, arguments.batch)
        subject = Subject(bundle, engine, arguments.device, arguments.batch)
        probes = stack.enter_context(Probes(subject))
        findings = []
        for finding in _findings(subject, probes, effort, arguments):
            _say(f"{RESULTS[finding.passed]}: {finding.check}, {finding.case}: {finding.detail}")
            findings.append(finding)
        result = _result(subject, effort, findings, perf_counter() - began)
        if out is not None:
            print(json.dumps(result), file=out)
    print(_report(result))
    return 0 if result["passed"] else 1


def _findings(subject: Subject, probes: Probes, effort: Effort, arguments: argparse.Namespace) -> Iterator[Finding]:
    """Return the wanted checks, in the order of CLAIMS."""
    directory = arguments.checkpoint
    checks: dict[str, Callable[[Progress], Iterator[Finding]]] = {
        "same text": lambda progress: same_text.check(subject, probes, effort, progress),
        "semantics": lambda progress: semantics.check(subject, probes, effort, progress),
        "rollback": lambda progress: rollback.check(subject, probes, effort, progress),
        "distribution": lambda progress: distribution.check(subject, probes, effort, progress),
    }
    if directory is not None:
        checks["checkpoint"] = lambda progress: checkpoint.check(subject, directory, probes, effort, progress)
    wanted = [name for name in CLAIMS if name in checks and name.replace(" ", "-") in (arguments.only or CHECKS)]
    lines = Lines({name: effort.work[name] for name in wanted})
    for name in wanted:
        yield from checks[name](partial(lines.show, name))


def _result(subject: Subject, effort: Effort, findings: list[Finding], seconds: float) -> dict[str, Any]:
    bundle = subject.bundle
    return {
        "bundle": str(bundle.path),
        "target": bundle.target.name,
        "draft": " and ".join(model.name for model in bundle.models.values() if model.kind != TARGET) or None,
        "dtype": bundle.target.contract.dtype,
        "weights": bundle.target.weights,
        "engine": subject.engine,
        "device": subject.device,
        "batch": subject.batch,
        "rounding_allowed": subject.rounding,
        "false_alarm": distribution.FALSE_ALARM,
        "effort": effort.name,
        "total_variation": effort.total_variation,
        "power": distribution.POWER,
        "left_out": effort.left_out,
        "seconds": seconds,
        "passed": all(finding.passed is not False for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def _report(result: dict[str, Any]) -> str:
    """A table of the cases, what each check claims, what was left out, and the verdict."""
    findings = result["findings"]
    rows = [(one["check"], one["case"], RESULTS[one["passed"]], one["detail"]) for one in findings]
    judged = [one["passed"] for one in findings if one["passed"] is not None]
    failed = judged.count(False)
    ties = sum(len(one["numbers"].get("near_ties", ())) for one in findings)
    of = f"{result['target']} with {result['draft'] or 'no draft'} in {result['engine']} on {result['device']}"
    verdict = f"NOT lossless: {failed} of {len(judged)} cases fail" if failed else f"all {len(judged)} cases pass"
    claims = [f"{name}: {CLAIMS[name]}" for name in dict.fromkeys(one["check"] for one in findings)]
    if "distribution" in (one["check"] for one in findings):
        claims.append(
            f"power: a fault that moves {result['total_variation']:g} of the probability (total variation) is caught "
            f"with probability {result['power']:g}; a sound one fails by chance with at most {result['false_alarm']:g}"
        )
    if result["left_out"]:
        claims.append(f"quick, so left out: {', '.join(result['left_out'])}")
    return "\n".join(
        [
            table([("check", "case", "result", "found"), *rows], left=4),
            "",
            *claims,
            "",
            f"{of}, {result['dtype']}: {verdict}, {ties} near ties excused, {result['seconds'] / 60:.1f} minutes",
        ]
    )


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 0.001 to 1")
    return value


class Lines:
    """Says what is tried now and how long the rest will take: for each stage, and where one lasts, again."""

    def __init__(self, work: Mapping[str, float]) -> None:
        self._time_left, self._began = TimeLeft(work), perf_counter()
        self._said, self._said_at = "", 0.0
        self._lock = Lock()  # cases run side by side

    def show(self, check: str, stage: str, done: float, total: float) -> None:
        with self._lock:
            now = perf_counter()
            self._time_left.reach(check, done / total)
            if stage != self._said or now - self._said_at > AGAIN:
                self._said, self._said_at = stage, now
                seconds = self._time_left.seconds(now - self._began)
                left = "" if seconds is None else f", about {in_time(seconds)} left"
                _say(f"[{self._time_left.share:4.0%}{left}] {stage}")


def _say(line: str) -> None:
    print(f"{line}\n", end="", file=sys.stderr, flush=True)  # at once, whatever another thread says
