"""PaSS: look-ahead embeddings, which the target reads after a token as if they were the next ones.

What it makes of the first says what follows the next token, of the second one place further, and so on. The
target itself stays as it is. Only the embeddings learn, and with --rank a LoRA that is added where it reads them: to
linear layers, but not to those of queries, keys and values, which graphs merge.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....engines import MAX_DRAFT_LENGTH, RequestError
from ....export.kinds.look_aheads import LORA, PARTS, PASS, WEIGHT
from ...training_settings import HEADS, HeadSettings
from .lesson import LATER, Lesson, missed, over
from .spoken import Rows, Spoken

SLOTS = 4  # one in so many is learned from in a step
UNSEEN = -1e9  # added to a score, so that nothing of it is seen
DOWN = 0.05  # of what a LoRA begins with
QKV = re.compile(r"(q|k|v|qkv|query|key|value|query_key_value)(_proj)?$|c_attn$")


class LookAheadEmbeddings(nn.Embedding):
    """Look-aheads, and the LoRA that is added where they are read: a matrix down and one up for each of the layers."""

    def __init__(self, count: int, width: int, layers: Mapping[str, nn.Linear], rank: int) -> None:
        super().__init__(count, width)
        self.names = list(layers) if rank else []
        self.down = nn.ParameterList(torch.randn(rank, layers[one].in_features) * DOWN for one in self.names)
        self.up = nn.ParameterList(torch.zeros(layers[one].out_features, rank) for one in self.names)


class PassLesson(Lesson[LookAheadEmbeddings]):
    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    def begin(self, spoken: Spoken, settings: HeadSettings) -> LookAheadEmbeddings:
        """All begin as the mean of the tokens that are said, as far apart as these are."""
        self._refuse_unfit(settings)
        said = self.teacher.embedding[spoken.tokens(spoken.learned).flatten().to(self.teacher.device)].float()
        look_aheads = LookAheadEmbeddings(
            settings.heads or HEADS, said.shape[1], self._adapted(), settings.rank or 0
        ).to(said.device)
        apart = torch.randn(look_aheads.weight.shape).to(said.device)
        look_aheads.weight = nn.Parameter(said.mean(0) + said.std(0) * apart)
        return look_aheads

    def _refuse_unfit(self, settings: HeadSettings) -> None:
        name, read = self.teacher.checkpoint.name, type(self.teacher.model.get_input_embeddings())
        window = self.teacher.checkpoint.shape.window
        if (settings.heads or HEADS) > MAX_DRAFT_LENGTH:
            raise RequestError(f"--heads is {settings.heads}, expected at most {MAX_DRAFT_LENGTH} look-aheads")
        if read is not nn.Embedding:
            raise RequestError(
                f"target {name} changes what it reads of its embedding ({read.__name__}), for which no look-aheads can "
                "be taught; choose another kind"
            )
        if window is not None and window < settings.length:
            raise RequestError(
                f"target {name} sees windows of {window} tokens, after which look-aheads are taught as if it saw all; "
                f"lower --length from {settings.length} to that"
            )

    def rates(self, head: LookAheadEmbeddings) -> list[tuple[Tensor, float]]:
        return []

    def loss(self, head: LookAheadEmbeddings, rows: Rows, done: float, draw: Any) -> Tensor:
        distributions, width, count = self.teacher.logits(rows.last).softmax(-1), rows.tokens.shape[1], len(head.weight)
        begins = int(torch.randint(min(SLOTS, width - count), (1,), generator=draw))
        slots = torch.arange(begins, width, SLOTS, device=distributions.device)
        said = self._said(head, rows, slots)
        total, weights = torch.zeros((), device=distributions.device), 0.0
        for place in range(count):
            read = slots[slots < width - 1 - place]
            log_q = said[:, : len(read), place].log_softmax(-1)
            total = total + LATER**place * missed(distributions[:, read + place + 1], log_q, over(done)).mean()
            weights += LATER**place
        return total / weights

    def distributions(self, head: LookAheadEmbeddings, rows: Rows, places: int) -> Iterator[tuple[Tensor, Tensor]]:
        slots = torch.arange(rows.tokens.shape[1], device=rows.last.device)
        said = self._said(head, rows, slots)
        for place in range(min(places, len(head.weight))):
            whose = slots[place + 1 :]
            yield whose, said[:, : len(whose), place]

    def _said(self, head: LookAheadEmbeddings, rows: Rows, slots: Tensor) -> Tensor:
        """Return the logits [B, S, count, V] of all look-aheads after the tokens in these slots [S].

        Each sees the text up to its slot, and the look-aheads before it. No token sees any of them.
        """
        from transformers import DynamicCache

        (batch, width), count, device = rows.tokens.shape, len(head.weight), slots.device
        cache, places = DynamicCache(config=self.teacher.config), torch.arange(count, device=device)
        self.teacher.read(rows.tokens, (), cache)
        positions = (slots[:, None] + 1 + places).flatten()
        group, place = torch.arange(len(positions), device=device) // count, places.repeat(len(slots))
        own = (group[:, None] == group) & (place[:, None] >= place)
        text = torch.arange(width, device=device) <= slots[group][:, None]
        unseen = torch.where(torch.cat([text, own], 1), 0.0, UNSEEN)[None, None].expand(batch, 1, -1, -1)
        embedded = head(place).expand(batch, -1, -1)
        with ExitStack() as added:
            layers = self._adapted()
            for name, down, up in zip(head.names, head.down, head.up, strict=True):
                added.enter_context(adding(layers[name], down, up))
            states = self.teacher.model(
                inputs_embeds=embedded,
                position_ids=positions[None].expand(batch, -1),
                attention_mask=unseen,
                cache=cache,
                use_cache=True,
            )
        found: Tensor = states.logits.view(batch, len(slots), count, -1)
        return found

    def _adapted(self) -> dict[str, nn.Linear]:
        projection = self.teacher.model.get_output_embeddings()
        return {
            name: module
            for name, module in self.teacher.model.named_modules()
            if isinstance(module, nn.Linear) and module is not projection and not QKV.search(name)
        }

    def tensors(self, head: LookAheadEmbeddings) -> dict[str, Tensor]:
        each = zip(head.names, head.down, head.up, strict=True)
        lora = {f"{LORA}{name}.{part}": one for name, *both in each for part, one in zip(PARTS, both, strict=True)}
        return {WEIGHT: head.weight} | lora

    def fields(self, head: LookAheadEmbeddings) -> dict[str, Any]:
        return {
            "model_type": PASS,
            "base_model_name_or_path": self.target_name,
            "num_look_aheads": len(head.weight),
            "dtype": "float16",
        }


@contextmanager
def adding(layer: nn.Linear, down: Tensor, up: Tensor) -> Iterator[None]:
    """Add a LoRA to all that a layer gives until the block ends."""
    linear = nn.functional.linear
    hook = layer.register_forward_hook(lambda _, inputs, output: output + linear(linear(inputs[0], down), up))
    try:
        yield
    finally:
        hook.remove()
