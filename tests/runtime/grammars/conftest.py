import pytest
from trt_spec.runtime.grammars.compiler import Compiler

from ...kit.models import write_tokenizer
from .vocabularies import DEMO, vocabulary


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    return Compiler(DEMO)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """Tokens 2, 3, 4 … are a, b, c …"""
    folder = tmp_path_factory.mktemp("letters")
    write_tokenizer(folder, 64)
    return Compiler(vocabulary(folder, 64, eos=1))
