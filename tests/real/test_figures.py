"""How fast the model answers with each source of proposals, beside transformers: a table that no test judges."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trt_spec.runtime import Decoder, SamplingParams

from .chats import questions_to_learn_from
from .conftest import Reference, command

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]
COPIED, DRAFTED, HEADED = "2,4", "1,2", "2,3"  # draft lengths
SPOKEN = 48  # chats whose answers are counted in n-grams


@pytest.fixture(scope="module")
def bundle(
    exported: Callable[..., tuple[Path, str]], draft: tuple[Path, dict[str, Any]], reference: Reference, home: Path
) -> Path:
    """With the draft, and with n-grams of what the target itself has answered to other questions."""
    bundle, _ = exported("none", draft[0])
    if not (text := home / "answers.txt").exists():
        asked = [reference.prompt(question) for question in questions_to_learn_from()[:SPOKEN]]
        with Decoder.open(bundle, max_batch=8) as decoder:
            answers = decoder.generate(asked, SamplingParams(max_new_tokens=128), draft_length=0)
        text.write_text("\n".join(answer.text for answer in answers))
        command("ngram", "--bundle", bundle, "--text", text)
    return bundle


def test_the_draft_agrees_more_often_than_before_and_changes_no_answer(
    bundle: Path, draft: tuple[Path, dict[str, Any]]
):
    """Acceptance is that of continuations which were held out; the answers are to questions that it never saw."""
    _, found = draft
    assert found["after"]["0.0"] > found["before"]["0.0"]
    assert found["after"]["1.0"] > found["before"]["1.0"]


def test_every_source_writes_the_text_of_transformers_and_this_is_how_fast(
    bundle: Path,
    exported: Callable[..., tuple[Path, str]],
    file: Path,
    draft: tuple[Path, dict[str, Any]],
    head: Path,
    prompts: Path,
    home: Path,
):
    checkpoints = {"model": ("--target-checkpoint", file, "--draft-checkpoint", draft[0])}
    checkpoints["lookup"] = checkpoints["model"][:2]
    headed, _ = exported("none", head, "none")
    found = {}
    for drafter, lengths, opened in (
        *((name, COPIED, bundle) for name in ("lookup", "suffix", "ngram")),
        ("model", DRAFTED, bundle),
        ("eagle3", HEADED, headed),
        ("eagle3+suffix", HEADED, headed),
    ):
        few = ("--prompts", prompts, "--max-new-tokens", 32, "--repeats", os.environ.get("REAL_REPEATS", "2"))
        peer = ("--compare", "hf", *checkpoints[drafter]) if drafter in checkpoints else ()
        out = home / f"bench-{drafter}.json"
        command(
            "bench", "--bundle", opened, "--drafter", drafter, "--draft-lengths", lengths, *few, *peer, "--json", out
        )
        found[drafter] = json.loads(out.read_text())
    for result in found.values():
        for one in (result["compared"] or {"settings": []})["settings"]:
            assert one["differs_at"] == [None] * result["prompts"]
    table = as_table(found)
    (home / "figures.md").write_text(table)
    print(table)


def as_table(found: dict[str, dict[str, Any]]) -> str:
    """Ratios to transformers' greedy generate, and to no draft, of each source at its best K."""
    plain = [result["settings"][0]["tokens_per_second"] for result in found.values()]
    theirs = [result["compared"]["settings"][0]["tokens_per_second"] for result in found.values() if result["compared"]]
    over = sum(one / other for one, other in zip(compared_plain(found), theirs, strict=True)) / len(theirs)
    rows = [
        "| source | K | accepted of examined | tokens a round | × no draft | × transformers' generate |",
        "|---|---|---|---|---|---|",
        f"| none ({sum(plain) / len(plain):.1f} tokens/s) | 0 | | 1 | 1 | {over:.2f} |",
    ]
    for drafter, result in found.items():
        best = max(result["settings"][1:], key=lambda one: one["speed_up"])
        rows.append(
            f"| {drafter} | {best['draft_length']} | {best['acceptance']:.2f} | {best['tokens_per_round']:.2f} | "
            f"{best['speed_up']:.2f} | {best['speed_up'] * over:.2f} |"
        )
        if result["compared"]:
            own, *others = result["compared"]["settings"]
            other = max(others, key=lambda one: one["tokens_per_second"])
            ratio = other["tokens_per_second"] / own["tokens_per_second"]
            kind = "assisted generation" if drafter == "model" else "prompt lookup"
            rows.append(f"| transformers' {kind} | {other['draft_length']} | | | {ratio / over:.2f} | {ratio:.2f} |")
    return "\n".join(rows) + "\n"


def compared_plain(found: dict[str, dict[str, Any]]) -> list[float]:
    return [result["settings"][0]["tokens_per_second"] for result in found.values() if result["compared"]]
