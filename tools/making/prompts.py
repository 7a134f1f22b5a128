"""The flags that say what a target shall continue, so that others learn from it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ...engines import EngineError, RequestError
from ...export.checkpoints.checkpoint import open_checkpoint
from ...export.checkpoints.vocabulary import read_vocabulary
from ...export.writing.quiet import quiet_libraries
from ..extras import install_command
from ..text_files import read_prompts


class Chats(list[str]):
    """Texts in which a template has written whatever tokens begin and end them."""


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


def token_ids(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each prompt that has some."""
    adds = not isinstance(prompts, Chats)
    return [ids for prompt in prompts if (ids := tokenizer.encode(prompt, add_special_tokens=adds).ids)]


def as_chats(asked: Sequence[str], target: str) -> Chats:
    """Write each question as a chat that the target is to answer."""
    try:
        from ..serving.templates import ChatTemplate
    except ModuleNotFoundError as error:
        raise EngineError(f"--chat needs {error.name}, which is not installed; {install_command('serve')}") from error
    with quiet_libraries():
        vocabulary = read_vocabulary(open_checkpoint(target))
    if vocabulary.chat_template is None:
        raise RequestError(f"checkpoint {target} has no chat template; leave out --chat")
    template = ChatTemplate(vocabulary.chat_template, vocabulary.tokenizer, vocabulary.entry())
    return Chats(template.render([{"role": "user", "content": one}]) for one in asked)
