"""The prompts that are shipped: texts of five kinds, and random tokens of the bundle's own vocabulary."""

import random
from pathlib import Path
from typing import TYPE_CHECKING

from ..text_files import read_prompts

if TYPE_CHECKING:
    from ...runtime.requests.prompts import Prompt

FOLDER = Path(__file__).parent
WRITTEN = ("code", "prose", "repetition", "chat")  # a file each
KINDS = ("python", *WRITTEN, "random")
RANDOM_PROMPTS, RANDOM_TOKENS = 8, 64
PYTHON_PROMPTS = (
    'def read_config(path):\n    """Read a configuration file and return a dictionary."""\n',
    '@property\ndef name(self):\n    """Return the name of the node."""\n    return self._name\n\n@property\ndef ',
    "def __eq__(self, other):\n    if not isinstance(other, ",
    "import os\nimport sys\nimport argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n        self._items = []\n',
    "    for key, value in sorted(items.items()):\n        if value is None:\n            ",
)


def bench_prompts(source: str, vocab_size: int) -> "list[Prompt]":
    """The prompts of a shipped kind, or those of the file `source`."""
    if source == "python":
        return list(PYTHON_PROMPTS)
    if source == "random":
        generator = random.Random(0)
        return [[generator.randrange(vocab_size) for _ in range(RANDOM_TOKENS)] for _ in range(RANDOM_PROMPTS)]
    return list(read_prompts(FOLDER / f"{source}.jsonl" if source in WRITTEN else Path(source)))
