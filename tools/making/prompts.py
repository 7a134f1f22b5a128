"""The flags that say what a target shall continue, so that others learn from it."""

import argparse
from pathlib import Path

from ...engines import EngineError, RequestError
from ...export.checkpoint import open_checkpoint
from ...export.quiet import quiet_libraries
from ...export.vocabulary import read_vocabulary
from ..extras import install_command
from ..text_files import read_prompts


def add_prompts_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="a prompt a line, or JSON lines")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompts are what users ask: write each as a chat, by the target's template",
    )


def read_chosen_prompts(arguments: argparse.Namespace) -> None:
    """Put the prompts themselves in place of both flags."""
    arguments.prompts = read_prompts(arguments.prompts)
    if vars(arguments).pop("chat"):
        arguments.prompts = as_chats(arguments.prompts, arguments.target)


def as_chats(asked: list[str], target: str) -> list[str]:
    """Write each question as a chat that the target is to answer."""
    try:
        from ..serving.templates import ChatTemplate
    except ModuleNotFoundError as error:
        raise EngineError(f"--chat needs {error.name}, which is not installed; {install_command('serve')}") from error
    with quiet_libraries():
        vocabulary = read_vocabulary(open_checkpoint(target))
    if vocabulary.chat_template is None:
        raise RequestError(f"checkpoint {target} has no chat template; leave out --chat")
    tokenizer = vocabulary.tokenizer
    template = ChatTemplate(vocabulary.chat_template, tokenizer, vocabulary.entry())
    begins = "".join(map(tokenizer.id_to_token, tokenizer.encode("").ids))  # which tokenizing adds again
    return [template.render([{"role": "user", "content": one}]).removeprefix(begins) for one in asked]
