"""A target and one of its heads, which says in torch what its distributions are."""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache
from trt_spec.export.checking.oracle import hidden_states
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
from trt_spec.export.kinds import open_head

from .bundles import export_pair
from .distributions import VOCAB

TEXT = "def one(two):\n    return two + 3\n" * 4  # on which it is decided how heads are wired


@dataclass(frozen=True)
class Headed:
    """A target and one of its heads, in a bundle and in torch."""

    bundle: Path
    target: Any
    head: Any
    reads: Any  # its features of the target's hidden states
    name: str = "eagle3"

    def features(self, tokens: list[int]) -> torch.Tensor:
        """Return what the head reads in the slot of each token but the first [L - 1, size]."""
        hidden, _ = hidden_states(self.target, torch.tensor([tokens]))
        found: torch.Tensor = self.reads(hidden)
        return found[0, :-1]

    def distributions(
        self, tokens: list[int], features: torch.Tensor, paths: list[list[int]], committed: int
    ) -> list[torch.Tensor]:
        """Return its distribution after `tokens` and each of these paths of proposals; shorter ones come first."""
        cache, count = DynamicCache(), len(tokens)
        if self.name in ("medusa", "blockwise"):  # each head says one place, whatever the others have said
            [said] = self.head(features[count - 2 : count - 1])[1]
            return [said[len(path), :VOCAB].softmax(-1) for path in paths]
        if self.name in ("dflash", "dspark"):
            [states] = self.head.blocks(torch.tensor(tokens), features[: count - 1], [count - 1])
            places, before = [len(path) for path in paths], [[*tokens, *path][-1] for path in paths]
            said = self.head.following(self.head.logits(states[places]), torch.tensor(before))
            return list(said[:, :VOCAB].softmax(-1))
        if self.head.mask_token is not None:
            paths = [[self.head.mask_token] * len(path) for path in paths]
        given = torch.cat([torch.zeros_like(features[:1]), features[: count - 1]])
        made, normed = self.head(torch.tensor([tokens]), given[None], torch.arange(count)[None], cache)
        known = {(): (made[:, -1:], normed[:, -1:], cache)}
        for path in sorted(map(tuple, paths), key=len):
            if path not in known:
                made, _, before = known[path[:-1]]
                cache = deepcopy(before)
                place = torch.tensor([[count + len(path) - 1]])
                known[path] = (*self.head(torch.tensor([[path[-1]]]), made, place, cache), cache)
        return [self.head.logits(known[tuple(path)][1])[0, -1, :VOCAB].softmax(-1) for path in paths]


def in_a_bundle(folder: Path, target: Path, heads: dict[str, Path]) -> dict[str, Headed]:
    bundle = export_pair(target, folder, list(heads.values()), text=TEXT).bundle
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    contract = open_checkpoint(target).shape.contract(256, "float32")
    sample = Sample(Tokenizer.from_file(str(target / "tokenizer.json")).encode(TEXT).ids, VOCAB)
    found = {}
    for name, head in heads.items():
        opened = open_head(head, target)
        assert opened is not None
        loaded = opened.kind.load(opened, model, contract, sample)
        found[name] = Headed(bundle, model, loaded.module, loaded.features, name)
    return found
