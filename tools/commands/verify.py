"""Certifies that a bundle, in an engine on this machine, says just what its target alone would say."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any

from ...engines import Bundle
from ...engines.bundle import TARGET
from ...runtime.scheduling.engine_choice import resolve
from ..certificate import checkpoint, distribution, rollback, same_text, semantics
from ..certificate.effort import FULL, POWER, QUICK, Effort
from ..certificate.probe import Probes
from ..certificate.subject import Finding, Progress, Subject
from ..certificate.time_left import TimeLeft
from ..console import in_time, table
from ..flags.engine import engine_name
from ..flags.verify import CHECKS, CLAIMS
from ..whole_file import whole_file

AGAIN = 10.0  # seconds between two lines of one stage
RESULTS = {True: "pass", False: "FAIL", None: "-"}


def run(arguments: argparse.Namespace) -> int:
    began = perf_counter()
    effort = QUICK if arguments.quick else FULL
    effort = effort.catching(arguments.total_variation or effort.total_variation)
    with ExitStack() as stack:
        out = stack.enter_context(whole_file(arguments.json)) if arguments.json else None
        bundle = Bundle.open(arguments.bundle)
        engine = resolve(bundle, engine_name(arguments), arguments.device, arguments.batch)
        subject = Subject(bundle, engine, arguments.device, arguments.batch, adapter=arguments.adapter)
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
        "adapter": None if subject.adapter is None else str(subject.adapter),
        "rounding_allowed": subject.rounding,
        "false_alarm": distribution.FALSE_ALARM,
        "effort": effort.name,
        "total_variation": effort.total_variation,
        "power": POWER,
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
