"""Running commands in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from trt_spec.tools.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """`run("generate", …)` as the shell would: exit code, standard output, standard error."""

    def run(*arguments: object) -> Result:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        return Result(code, *capfd.readouterr())

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def assert_refused(result: Result, message: str) -> None:
    """Exit code 2 and one line on standard error that holds `message`; nothing on standard output."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("trt-spec: error: ")
    assert message in result.err
    assert result.err.count("\n") == 1
