"""Certify that a bundle, in an engine on this machine, says just what its target alone would say.

Exit code 1 when a check fails: the distribution of what is sampled, the same text for every draft length, drafter,
batch and engine, caches after rollback, what request parameters mean, and, with --checkpoint, the export.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from ...engines import Bundle, RequestError
from ..certificate import checkpoint, distribution, rollback, same_text, semantics
from ..certificate.subject import Finding, Subject
from ..console import table
from ..flags.engine import add_engine_flags
from ..flags.sampling import positive
from ..whole_file import whole_file

CHECKS = ("same-text", "semantics", "rollback", "checkpoint", "distribution")
BATCH = 64
TOTAL_VARIATION = 0.05
RESULTS = {True: "pass", False: "FAIL", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="made by export-models")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="what the bundle's target was exported from")
    parser.add_argument(
        "--only", action="append", choices=CHECKS, help="run this check, not all of them; may be repeated"
    )
    parser.add_argument(
        "--batch", type=positive, default=BATCH, metavar="N", help=f"the most rows decoded together (default {BATCH})"
    )
    parser.add_argument(
        "--total-variation",
        type=_share,
        default=TOTAL_VARIATION,
        metavar="X",
        help=f"what of the distribution is caught with power {distribution.POWER:g}; samples grow with its inverse "
        f"square (default {TOTAL_VARIATION})",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was found to this file, too")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    began = perf_counter()
    if arguments.checkpoint is None and "checkpoint" in (arguments.only or ()):
        raise RequestError("--only checkpoint needs --checkpoint DIR; name what the bundle was exported from")
    with ExitStack() as stack:
        out = stack.enter_context(whole_file(arguments.json)) if arguments.json else None
        subject = Subject(Bundle.open(arguments.bundle), arguments.engine, arguments.device, arguments.batch)
        findings = []
        for finding in _findings(subject, arguments):
            _progress(f"{RESULTS[finding.passed]}: {finding.check}, {finding.case}: {finding.detail}")
            findings.append(finding)
        result = _result(subject, findings, perf_counter() - began)
        if out is not None:
            print(json.dumps(result), file=out)
    print(_report(result))
    return 0 if result["passed"] else 1


def _findings(subject: Subject, arguments: argparse.Namespace) -> Iterator[Finding]:
    wanted = arguments.only or CHECKS
    if arguments.checkpoint is not None and "checkpoint" in wanted:
        yield from checkpoint.check(subject, arguments.checkpoint, _progress)
    if "same-text" in wanted:
        yield from same_text.check(subject, _progress)
    if "semantics" in wanted:
        yield from semantics.check(subject, _progress)
    if "rollback" in wanted:
        yield from rollback.check(subject, _progress)
    if "distribution" in wanted:
        yield from distribution.check(subject, arguments.total_variation, _progress)


def _result(subject: Subject, findings: list[Finding], seconds: float) -> dict[str, Any]:
    bundle = subject.bundle
    return {
        "bundle": str(bundle.path),
        "target": bundle.target.name,
        "draft": None if bundle.draft is None else bundle.draft.name,
        "dtype": bundle.target.contract.dtype,
        "weights": bundle.target.weights,
        "engine": subject.engine,
        "device": subject.device,
        "batch": subject.batch,
        "rounding_allowed": subject.rounding,
        "false_alarm": distribution.FALSE_ALARM,
        "seconds": seconds,
        "passed": all(finding.passed is not False for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def _report(result: dict[str, Any]) -> str:
    findings = result["findings"]
    rows = [(one["check"], one["case"], RESULTS[one["passed"]], one["detail"]) for one in findings]
    judged = [one["passed"] for one in findings if one["passed"] is not None]
    failed = judged.count(False)
    ties = sum(len(one["numbers"].get("near_ties", ())) for one in findings)
    of = f"{result['target']} with {result['draft'] or 'no draft'} in {result['engine']} on {result['device']}"
    verdict = f"NOT lossless: {failed} of {len(judged)} cases fail" if failed else f"all {len(judged)} cases pass"
    return (
        f"{table([('check', 'case', 'result', 'found'), *rows], left=4)}\n\n"
        f"{of}, {result['dtype']}: {verdict}, {ties} near ties excused, {result['seconds'] / 60:.1f} minutes"
    )


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 0.001 to 1")
    return value


def _progress(stage: str) -> None:
    print(stage, file=sys.stderr, flush=True)
