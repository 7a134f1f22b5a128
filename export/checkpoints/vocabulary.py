"""Read the tokenizer of a checkpoint: its file, its token map, its special ids and its chat template."""

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...engines import ExportError, Speech, TokenizerEntry
from ...engines.errors import one_line
from .checkpoint import Checkpoint, reading
from .marian_tokenizer import END, SOURCE, marian_tokenizer
from .reading import read_object
from .recommended import FILE, recommended_sampling

MULTILINGUAL = 51_865  # tokens that every Whisper has which was trained on more than English
SEARCHES = {  # settings, with which value they ask for nothing, and what is done else
    "num_beams": (1, "which requests may ask for: say --num-beams"),
    "no_repeat_ngram_size": (0, "which this version does not do"),
}
NO_TIMES = "<|notimestamps|>"  # the last of Whisper's tokens before the times
SECONDS_OF_TIME = 0.02  # from each to the next
TOKENIZER_FILES = ("*token*", "vocab*", "spiece*", "sentencepiece*", "*.spm", "*.tiktoken", "tekken*", "merges*")


@dataclass(frozen=True)
class Vocabulary:
    """Read the vocabulary that two models must share to speculate together, and what the runtime needs of it."""

    name: str  # of the checkpoint
    tokenizer: Any
    tokens: dict[int, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the tokenizer's own first
    chat_template: str | None
    sampling: dict[str, float] = field(default_factory=dict)  # the defaults that its makers recommend
    start_ids: tuple[int, ...] = ()  # what a text begins with, if it has a source
    unsaid_ids: tuple[int, ...] = ()  # tokens that shall never be said
    speech: Speech | None = None  # of a model that hears
    forced_end_ids: tuple[int, ...] = ()  # of which one ends a text that becomes as long as it may
    note: str | None = None  # a way of searching that its makers recommend

    def entry(self) -> TokenizerEntry:
        return TokenizerEntry(
            max(self.tokens) + 1,
            self.bos_token_id,
            self.eos_token_ids,
            self.chat_template,
            self.sampling,
            self.start_ids,
            self.unsaid_ids,
            self.speech,
            self.forced_end_ids,
        )

    def save(self, file: Path) -> None:
        """Write the tokenizer as its library does, whose own method raises a bare Exception on a full disk."""
        file.write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Read the tokenizer; ids that no token has are no special ids."""
    tokenizer, settings = _tokenizer(checkpoint)
    hears = checkpoint.shape.source is not None and checkpoint.shape.source.sound is not None
    if hears:
        tokenizer = _with_times(tokenizer, checkpoint.shape.vocab_size)
    tokenizer.no_truncation()  # what a training run left in the file would cut prompts without a word
    tokenizer.no_padding()
    tokens = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    if not tokens:
        raise ExportError(f"the tokenizer of checkpoint {checkpoint.name} has no tokens")
    generation = {} if checkpoint.gguf else _settings(checkpoint, FILE)

    def ids(kind: str) -> tuple[int, ...]:
        configured = generation.get(f"{kind}_token_id")
        if configured is None:
            configured = getattr(checkpoint.config, f"{kind}_token_id", None)
        own = tokenizer.token_to_id(_text(settings.get(f"{kind}_token")))
        found = [own, *(configured if isinstance(configured, list) else [configured])]
        return tuple(dict.fromkeys(index for index in found if type(index) is int and index in tokens))

    largest = max(tokens)
    if largest >= checkpoint.shape.vocab_size:
        raise ExportError(
            f"the tokenizer of checkpoint {checkpoint.name} has the token {tokens[largest]!r} with id {largest}, its "
            f"model has only {checkpoint.shape.vocab_size}; take the tokenizer that belongs to the model"
        )
    bos = ids("bos")
    said = {} if checkpoint.shape.source is None else _settings(checkpoint, "config.json") | generation
    return Vocabulary(
        name=checkpoint.name,
        tokenizer=tokenizer,
        tokens=tokens,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=ids("eos"),
        chat_template=_chat_template(checkpoint, settings),
        sampling=recommended_sampling(generation),
        start_ids=_known(tokens, said.get("decoder_start_token_id"), said.get("forced_bos_token_id")),
        unsaid_ids=_unsaid(tokens, said),
        speech=_speech(tokens, said) if hears else None,
        forced_end_ids=_known(tokens, *_each((generation or said).get("forced_eos_token_id"))),  # as transformers asks
        note=_searches(checkpoint.name, said),
    )


def _each(configured: Any) -> list[Any]:
    return configured if isinstance(configured, list) else [configured]


def _known(tokens: dict[int, str], *ids: Any) -> tuple[int, ...]:
    return tuple(index for index in ids if type(index) is int and index in tokens)


def _unsaid(tokens: dict[int, str], settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the single tokens that a decoder shall never say."""
    alone = [words[0] for words in settings.get("bad_words_ids") or () if len(words) == 1]
    return _known(tokens, *dict.fromkeys([*alone, *(settings.get("suppress_tokens") or ())]))


def _searches(name: str, settings: dict[str, Any]) -> str | None:
    asked = [
        f"{key} {value}, {done}"
        for key, (least, done) in SEARCHES.items()
        if (value := settings.get(key, least)) not in (least, None)
    ]
    return f"{name} asks for {'; and for '.join(asked)}" if asked else None


def _speech(tokens: dict[int, str], settings: dict[str, Any]) -> Speech:
    begin, latest = settings.get("begin_suppress_tokens") or (), settings.get("max_initial_timestamp_index")
    multilingual = settings.get("is_multilingual", max(tokens) + 1 >= MULTILINGUAL)
    return Speech(bool(multilingual), _known(tokens, *begin), latest if type(latest) is int else None)


def _with_times(tokenizer: Any, vocab_size: int) -> Any:
    """Name the tokens after the last of Whisper's own, which are times, and take them for no text."""
    first = tokenizer.token_to_id(NO_TIMES)
    if first is None:
        return tokenizer
    times = {first + 1 + number: f"<|{number * SECONDS_OF_TIME:.2f}|>" for number in range(vocab_size - first - 1)}
    fields = json.loads(tokenizer.to_str())
    others = [token for token in fields["added_tokens"] if token["id"] not in times]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": index, "content": content, "special": True} | plain for index, content in times.items()]
    return Tokenizer.from_str(json.dumps(fields | {"added_tokens": others + added}))


def _tokenizer(checkpoint: Checkpoint) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer, and what its own file does not say: special tokens and the chat template."""
    file = checkpoint.path / "tokenizer.json"
    settings = {} if checkpoint.gguf else _settings(checkpoint, "tokenizer_config.json")
    if (checkpoint.path / SOURCE).is_file() and not file.is_file():
        return marian_tokenizer(checkpoint.name, checkpoint.path), {"eos_token": END} | settings
    if checkpoint.gguf is None and not any(any(checkpoint.path.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ExportError(
            f"checkpoint {checkpoint.name} has no tokenizer, expected tokenizer.json, tokenizer.model or vocab.json; "
            "copy the tokenizer's files of the model that it was made from into it"
        )
    try:
        if file.is_file() and checkpoint.gguf is None:
            return Tokenizer.from_file(str(file)), settings
        from transformers import AutoTokenizer

        stored = {} if checkpoint.gguf is None else {"gguf_file": checkpoint.gguf}
        with reading(checkpoint.gguf):
            made = AutoTokenizer.from_pretrained(
                checkpoint.path, local_files_only=True, trust_remote_code=False, **stored
            )
    except Exception as error:  # the Rust tokenizers raise bare Exception, a conversion anything
        if (checkpoint.path / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
            raise ExportError(
                f"the tokenizer of checkpoint {checkpoint.name} is a file of sentencepiece, which is not installed; "
                "pip install 'trt-spec[export]'"
            ) from error
        raise ExportError(f"the tokenizer of checkpoint {checkpoint.name} cannot be read: {one_line(error)}") from error
    own = {name: getattr(made, name) for name in ("bos_token", "eos_token", "chat_template")}
    return _without_additions(made.backend_tokenizer, checkpoint.shape.vocab_size), own | settings


def _without_additions(tokenizer: Any, vocab_size: int) -> Any:
    """Leave out what a conversion has added beyond the model's own tokens, as GPT2's end to what has another."""
    fields = json.loads(tokenizer.to_str())
    own = [token for token in fields["added_tokens"] if token["id"] < vocab_size]
    return (
        tokenizer if own == fields["added_tokens"] else Tokenizer.from_str(json.dumps(fields | {"added_tokens": own}))
    )


def _chat_template(checkpoint: Checkpoint, settings: dict[str, Any]) -> str | None:
    """Read the template from its own file, else take it from the settings: the one, or of several the default."""
    if checkpoint.gguf is None:
        file = checkpoint.path / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ExportError(
                    f"{file.name} of checkpoint {checkpoint.name} cannot be read ({error}); download it again"
                ) from error
        settings = _settings(checkpoint, "chat_template.json") | settings  # which processors of images have
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {one["name"]: one.get("template") for one in template if isinstance(one, dict) and "name" in one}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def _text(token: Any) -> str:
    """Read a special token, which is in the settings as a string or as an object around one."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _settings(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Read a file that a checkpoint may lack."""
    file = checkpoint.path / name
    return read_object(checkpoint.name, file) if file.is_file() else {}
