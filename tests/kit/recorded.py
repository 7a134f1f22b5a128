"""What transformers' `generate` says greedily of the shipped target, recorded in greedy_texts.json.

`python -m tests.kit.recorded` records it again, which another checkpoint takes.
"""

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

FILE = Path(__file__).with_name("greedy_texts.json")
CHECKPOINT = Path(__file__).parents[2] / "tools" / "demo_pair" / "pycode-14m"
PROMPTS, NEW_TOKENS = 50, 128


@dataclass(frozen=True)
class Recording:
    versions: dict[str, str]  # of what has computed it
    checkpoint: str  # its sha256
    prompts: list[list[int]]
    texts: list[list[int]]  # what follows each, end of text included


@torch.inference_mode()
def transformers_greedy(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """What `generate` says, one prompt at a time, end of text included."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def sha256_of(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(checkpoint.iterdir()):
        if file.suffix in (".json", ".safetensors"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def read(file: Path = FILE, checkpoint: Path = CHECKPOINT) -> Recording:
    recording = Recording(**json.loads(file.read_text()))
    assert recording.checkpoint == sha256_of(checkpoint), (
        f"{file.name} is of another checkpoint than {checkpoint}; record it again with python -m tests.kit.recorded"
    )
    return recording


def stdlib_prompts() -> list[list[int]]:
    """The beginnings of the alphabetically first large modules of the running Python, 20 to 120 tokens of each."""
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(folder.glob("*.py")) if file.stat().st_size > 4000][:PROMPTS]
    texts = [file.read_text(encoding="utf-8")[1500:3500] for file in files]
    return [tokenizer.encode(text).ids[: 20 + 2 * index] for index, text in enumerate(texts)]


def record() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    prompts = stdlib_prompts()
    texts = transformers_greedy(model, prompts, NEW_TOKENS)
    versions = {one.__name__: one.__version__ for one in (transformers, torch)}
    fields = asdict(Recording(versions, sha256_of(CHECKPOINT), prompts, texts))
    # A line for each prompt and each text.
    said = json.dumps(fields).replace(": [[", ": [\n[").replace("], [", "],\n[").replace(', "texts"', ',\n"texts"')
    FILE.write_text(said + "\n")


if __name__ == "__main__":
    record()
