"""Prompts are random tokens, or repeat themselves."""

import torch

REPEATS = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]  # of which copies are found


def random_prompts(vocab: int, lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in lengths]
