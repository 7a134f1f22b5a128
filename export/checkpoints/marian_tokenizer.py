"""Makes one tokenizer of Marian's files: two models of sentencepiece, and the ids of the pieces of both.

The source's model divides texts, and its pieces have its own scores. All others, of the target's model alone, have such
low ones that they are never preferred. Characters that the source's model lacks are unknown together, unless such a run
is a piece as a whole. A code of a language, such as `>>fra<<`, is a token wherever it occurs, in Marian only at the
beginning.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from ...engines import ExportError
from ...engines.errors import one_line
from .reading import read_object

SOURCE = "source.spm"
UNKNOWN, END, PADDING = "<unk>", "</s>", "<pad>"
UNIGRAM = 1  # the kind of model, as sentencepiece numbers them,
NORMAL, UNKNOWN_TYPE, CONTROL, UNUSED = 1, 2, 3, 5  # and of pieces
WHOLE_RUN = -1e3  # the score of a piece of characters that the source's model lacks: one is better than two
OF_THE_OTHER = -1e6  # the score of all other pieces, worse than any text in pieces of the source's model
SPACE = "▁"  # as sentencepiece spells it


def marian_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Return a tokenizer that gives MarianTokenizer's ids and texts, or refuse what it could not give exactly."""
    if (folder / "target_vocab.json").is_file():
        raise ExportError(f"checkpoint {name} has tokens of its own on either side, expected one vocab.json for both")
    ids = read_object(name, folder / "vocab.json")
    whole = all(type(each) is int for each in ids.values()) and sorted(ids.values()) == [*range(len(ids))]
    if not whole or not {UNKNOWN, END} <= ids.keys():
        raise ExportError(f"vocab.json of checkpoint {name} has no ids from 0 on with {UNKNOWN} and {END} among them")
    spm = _read(name, folder / SOURCE)
    scores: dict[str, float] = {piece.piece: piece.score for piece in spm.pieces if piece.type == NORMAL}
    known = {character for piece in scores for character in piece}
    _refuse(name, spm, ids, known - scores.keys())
    others = {piece for piece in ids if not known.intersection(piece)}

    def score(piece: str) -> float:
        return scores.get(piece, WHOLE_RUN if piece in others else OF_THE_OTHER)

    pieces = [(piece, score(piece)) for piece in sorted(ids, key=ids.__getitem__)]
    tokenizer = Tokenizer(Unigram(pieces, ids[UNKNOWN], False))
    tokenizer.normalizer = normalizers.Sequence([*_normalizers(spm), *_runs(known, others)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Replace(Regex(r"\A +| +\z"), "")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {END}", special_tokens=[(END, ids[END])])
    tokenizer.add_special_tokens([one for one in (UNKNOWN, END, PADDING) if one in ids])
    codes = [piece for piece in ids if piece.startswith(">>") and piece.endswith("<<")]
    tokenizer.add_tokens([AddedToken(code, normalized=False) for code in codes])
    return tokenizer


def _read(name: str, file: Path) -> Any:
    from transformers.convert_slow_tokenizer import import_protobuf

    try:
        model = import_protobuf().ModelProto()
    except ImportError as error:
        raise ExportError(
            f"the tokenizer of checkpoint {name} is a file of sentencepiece, which is not installed; "
            "pip install 'trt-spec[export]'"
        ) from error
    try:
        model.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's own, which has no types
        raise ExportError(
            f"{file.name} of checkpoint {name} is no model of sentencepiece ({one_line(error)}); download it again"
        ) from error
    return model


def _refuse(name: str, spm: Any, ids: dict[str, int], alone: set[str]) -> None:
    """Refuse a model of sentencepiece whose ways this tokenizer does not have."""
    trained, rules = spm.trainer_spec, spm.normalizer_spec
    lacking = [one.piece for one in spm.pieces if one.type == NORMAL and one.piece not in ids]
    kinds = {one.type for one in spm.pieces} - {NORMAL, UNKNOWN_TYPE, CONTROL, UNUSED}
    reasons = {
        "is no unigram model": trained.model_type != UNIGRAM,
        "has pieces of other kinds than usual": bool(kinds),
        "puts no space before a text": not rules.add_dummy_prefix or not rules.escape_whitespaces,
        "keeps spaces as they are": not rules.remove_extra_whitespaces,
        "ends words with spaces": trained.treat_whitespace_as_suffix,
        "has rules for the texts that it gives": bool(spm.denormalizer_spec.precompiled_charsmap),
        f"has {len(alone)} characters in longer pieces alone": bool(alone),
        f"has pieces that vocab.json lacks ({len(lacking)}: {', '.join(lacking[:3])})": bool(lacking),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ExportError(
            f"{SOURCE} of checkpoint {name} {found[0]}, and its texts could not be divided exactly; put a "
            "tokenizer.json beside the weights"
        )


def _normalizers(spm: Any) -> list[normalizers.Normalizer]:
    """Return the rules for characters, and one space between words."""
    rules = spm.normalizer_spec.precompiled_charsmap
    spaces = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return [normalizers.Precompiled(rules), *spaces] if rules else spaces


def _runs(known: set[str], others: set[str]) -> list[normalizers.Normalizer]:
    """Return what makes one unknown character of each run of them, unless it is a piece."""
    unknown = next(one for one in map(chr, range(0xE000, 0xF000)) if one not in known and one not in others)
    stranger = f"[^{_spelled(sorted(known | {' '}))}]"
    pieces = "|".join(map(_spelled, sorted(others)))
    unless = f"(?!(?:{pieces})(?!{stranger}))" if pieces else ""
    return [normalizers.Replace(Regex(f"(?<!{stranger}){unless}{stranger}+"), unknown)]


def _spelled(characters: Any) -> str:
    return "".join(f"\\x{{{ord(one):x}}}" for one in characters)
