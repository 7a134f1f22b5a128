"""The flags that say how messages become a prompt, and the template that they ask for."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engines import Bundle, EngineError, RequestError
from ..extras import install_command
from ..text_files import read_text

if TYPE_CHECKING:
    from ...runtime import Decoder
    from ..serving.templates import ChatTemplate

Messages = list[dict[str, Any]]


def add_template_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the model reads before the conversation")
    parser.add_argument(
        "--chat-template", metavar="F", type=Path, help="a jinja file to use instead of the bundle's chat template"
    )


def given_template(arguments: argparse.Namespace) -> str | None:
    """Read the template that takes the place of the bundle's, if one was named."""
    return None if arguments.chat_template is None else read_text(arguments.chat_template, "chat template")


def template_of(arguments: argparse.Namespace, decoder: "Decoder") -> "ChatTemplate":
    try:
        from ..serving.templates import ChatTemplate
    except ModuleNotFoundError as error:
        raise EngineError(f"chat needs {error.name}, which is not installed; {install_command('serve')}") from error
    source = template_source(arguments, decoder.bundle)
    return ChatTemplate(source, decoder.tokenizer, decoder.bundle.tokenizer, decoder.images)


def template_source(arguments: argparse.Namespace, bundle: Bundle) -> str:
    """Return the text of the template that was named, or else of the bundle's own."""
    source = given_template(arguments) or bundle.tokenizer.chat_template
    if source is None:
        raise RequestError(f"bundle {bundle.path} has no chat template; give one with --chat-template FILE")
    return source


def beginning(arguments: argparse.Namespace) -> Messages:
    """Return the messages before the user's first."""
    return [{"role": "system", "content": arguments.system}] if arguments.system else []
