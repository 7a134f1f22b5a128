"""The task of the shipped encoder–decoders: to write a sentence out of which small words and signs were left.

The sentences are those of the docstrings of the standard library of the running interpreter and of the packages
installed beside it. A telegram is a function of its sentence, so that anybody can write one.
"""

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from pathlib import Path

from .train_pair import library_files, python_files, texts

SMALL = frozenset(("a", "an", "are", "be", "for", "in", "is", "of", "the", "to"))
HELD_OUT = 20  # one sentence in so many, by its own hash, so that none is learned from another file
ORDINARY = re.compile(r"[A-Z][a-z]*(?:[ ,;:'()-]+[A-Za-z]+){3,30}\.")
BORDER = re.compile(r"(?<=\.)\s+(?=[A-Z])")
PARAGRAPH = re.compile(r"\n\s*\n")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def telegram(sentence: str) -> str:
    """Leave out small words, capitals, commas and the full stop: `Return the name.` becomes `return name`."""
    words = sentence.lower().replace(",", "").rstrip(".").split()
    return " ".join(word for word in words if word not in SMALL)


def library_sentences() -> list[str]:
    """The ordinary sentences of the standard library, each once."""
    return _sentences(library_files())


def all_sentences() -> list[str]:
    """Return these and the sentences of all packages that are installed, each once."""
    packages = Path(sysconfig.get_path("purelib"))
    return list(dict.fromkeys(library_sentences() + _sentences(python_files(packages))))


def is_held_out(sentence: str) -> bool:
    return int.from_bytes(sha256(sentence.encode()).digest()[:4], "big") % HELD_OUT == 0


def _sentences(files: list[Path]) -> list[str]:
    found = (_ordinary(text) for source in texts(files) for text in _docstrings(source))
    return list(dict.fromkeys(chain.from_iterable(found)))


def _docstrings(source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in others' strings
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # a few test files are meant to be no Python
            return
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def _ordinary(text: str) -> Iterator[str]:
    for paragraph in PARAGRAPH.split(text):
        for sentence in BORDER.split(" ".join(paragraph.split())):
            if ORDINARY.fullmatch(sentence):
                yield sentence
