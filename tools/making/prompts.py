"""What a target shall continue, so that others learn from it."""

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


def chosen_prompts(file: Path, chat: bool, target: str) -> Sequence[str]:
    """Read the prompts of a file, as texts to continue or as what users ask."""
    prompts = read_prompts(file)
    return as_chats(prompts, target) if chat else prompts


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
