"""The tokenizer of a checkpoint: its file, its token map, its special ids and its chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..engines import ExportError, TokenizerEntry
from .checkpoint import Checkpoint


@dataclass(frozen=True)
class Vocabulary:
    """What two models must share to speculate together, and what the runtime needs."""

    name: str  # of the checkpoint
    tokenizer: Any
    tokens: dict[int, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the tokenizer's own first
    chat_template: str | None

    def entry(self) -> TokenizerEntry:
        return TokenizerEntry(max(self.tokens) + 1, self.bos_token_id, self.eos_token_ids, self.chat_template)


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Read the tokenizer; ids that no token has are no special ids."""
    tokenizer = _tokenizer(checkpoint)
    tokenizer.no_truncation()  # what a training run left in the file would cut prompts without a word
    tokenizer.no_padding()
    tokens = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    if not tokens:
        raise ExportError(f"the tokenizer of checkpoint {checkpoint.name} has no tokens")
    settings = _json(checkpoint.path / "tokenizer_config.json")
    generation = _json(checkpoint.path / "generation_config.json")

    def ids(kind: str) -> tuple[int, ...]:
        configured = generation.get(f"{kind}_token_id")
        if configured is None:
            configured = getattr(checkpoint.config, f"{kind}_token_id", None)
        own = tokenizer.token_to_id(_text(settings.get(f"{kind}_token")))
        found = [own, *(configured if isinstance(configured, list) else [configured])]
        return tuple(dict.fromkeys(index for index in found if index in tokens))

    largest = max(tokens)
    if largest >= checkpoint.shape.vocab_size:
        raise ExportError(
            f"the tokenizer of checkpoint {checkpoint.name} has the token {tokens[largest]!r} with id {largest}, its "
            f"model has only {checkpoint.shape.vocab_size}; take the tokenizer that belongs to the model"
        )
    bos = ids("bos")
    return Vocabulary(
        name=checkpoint.name,
        tokenizer=tokenizer,
        tokens=tokens,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=ids("eos"),
        chat_template=_chat_template(checkpoint.path, settings),
    )


def _tokenizer(checkpoint: Checkpoint) -> Any:
    file = checkpoint.path / "tokenizer.json"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
        return converted.backend_tokenizer
    except Exception as error:  # the Rust tokenizers raise bare Exception, a conversion anything
        reason = " ".join(str(error).split())
        raise ExportError(f"the tokenizer of checkpoint {checkpoint.name} cannot be read: {reason}") from error


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {choice["name"]: choice["template"] for choice in template}.get("default")
    return template if isinstance(template, str) else None


def _text(token: Any) -> str:
    """A special token stands in its settings as a string or as an object around one."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ExportError(f"{file} is no JSON ({error}); download the checkpoint again") from error
    return fields if isinstance(fields, dict) else {}
