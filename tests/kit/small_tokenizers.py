"""Tokenizers of the two common kinds read any text in a few hundred tokens."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers


def byte_level(special: tuple[str, ...]) -> Tokenizer:
    """A token for each byte, then a few words, then the special tokens, and one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def in_pieces(special: tuple[str, ...]) -> Tokenizer:
    """As sentencepiece has them: spaces are ▁, bytes fall back, and special tokens stand in the vocabulary itself."""
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.<>|[]/"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(special))
    return tokenizer
