"""Errors that users can cause or meet: a sentence with subject, what was found, what was expected, what to do."""


class TrtSpecError(Exception):
    """Base of all errors meant for the user; the command line prints them without a traceback."""


class BundleError(TrtSpecError):
    """A bundle is missing, damaged, foreign or newer than this version."""


class ContractError(TrtSpecError):
    """A graph does not have the inputs, outputs, shapes or dtypes that its contract promises."""


class PairError(TrtSpecError):
    """Draft and target cannot speculate together."""


class EngineError(TrtSpecError):
    """An engine is missing, or cannot run this graph on this machine."""


class EngineEnded(EngineError):
    """An engine can run nothing any more; its graph can be opened again."""


class RequestError(TrtSpecError):
    """A request or setting is invalid; nothing was started."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field  # the parameter at fault, if it is a single one


class ExportError(TrtSpecError):
    """A checkpoint cannot be exported, or its graph does not compute what the checkpoint computes."""


def first_line(problem: object) -> str:
    """Return the first line of a library's message, to quote in ours; its type if the message is empty."""
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def one_line(problem: object) -> str:
    """Return a library's whole message on one line, to quote in ours; its type if the message is empty."""
    return " ".join(str(problem).split()) or type(problem).__name__


def counted(count: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless there is one."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
