"""The byte that each printable character stands for in byte-level BPE."""


def _symbols() -> dict[str, bytes]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): bytes([byte]) for byte in range(256)}


BYTE_OF_SYMBOL = _symbols()
