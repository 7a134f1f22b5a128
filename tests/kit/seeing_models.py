"""Tiny random checkpoints that see, with the processors of tiny images, and what transformers says of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from trt_spec.export import ExportReport, export_bundle
from trt_spec.runtime.images.picture import Picture
from trt_spec.runtime.images.reader import ImageReader
from trt_spec.runtime.memory.sight import Sight

from .image_processors import tokenizer, write_processor
from .whole_models import TEXT

TOKENS = tokenizer().get_vocab_size()
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
EYES: dict[str, Any] = {  # by the names that one or the other has for them
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size"), 32),
    "intermediate_size": 48,
    **dict.fromkeys(("num_hidden_layers", "depth"), 3),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    "head_dim": 16,
    "patch_size": 7,
    "image_size": 28,
}
OF_EYES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    **{kind: {"patch_size": 4, "image_size": 16} for kind in ("smolvlm", "idefics3")},
    "qwen3_vl": {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 25},
}
OF_TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_5_vl": {"rope_parameters": MROPE},
    "qwen3_vl": {"rope_parameters": MROPE | {"mrope_interleaved": True}},
}
OF_WHOLE: dict[str, dict[str, Any]] = {
    "llava": {"vision_feature_select_strategy": "default"},
    "llava-pixtral": {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    "gemma3": {"mm_tokens_per_image": 4},
    "mistral3": {"spatial_merge_size": 2, "vision_feature_layer": -1},
    "smolvlm": {"scale_factor": 2},
    "idefics3": {"scale_factor": 2},
}
IMAGE_TOKEN = {
    "llava": "<image>",
    "llava-pixtral": "[IMG]",
    "gemma3": "<image_soft_token>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "mistral3": "[IMG]",
    "idefics3": "<image>",
    "smolvlm": "<image>",
}
PARTS = {"llava-pixtral": ("mistral", "pixtral")}  # the types of text model and vision tower, if others than usual
PLACEHOLDER = IMAGE_TOKEN | {"gemma3": "<start_of_image>"}


def seeing(kind: str, path: Path, seed: int = 0) -> Any:
    """Write a tiny random checkpoint that sees, with its processor, and return its model."""
    known, spoken = CONFIG_MAPPING[kind.partition("-")[0]], tokenizer()
    parts = dict(zip(("text_config", "vision_config"), PARTS.get(kind, ()), strict=False))
    own = known(**{name: CONFIG_MAPPING[part]() for name, part in parts.items()})
    sizes = TEXT | {"vocab_size": TOKENS, "max_position_embeddings": 1024, "tie_word_embeddings": False}
    sizes |= {"bos_token_id": None, "eos_token_id": spoken.token_to_id("</s>")}
    text = type(own.get_text_config())(**sizes | OF_TEXT.get(kind, {})).to_dict()
    vision = type(own.vision_config)().to_dict()
    vision |= {name: value for name, value in EYES.items() if name in vision} | OF_EYES.get(kind, {})
    token = spoken.token_to_id(IMAGE_TOKEN[kind])
    ids = {name: token for name in ("image_token_id", "image_token_index") if name in own.to_dict()}
    more = OF_WHOLE.get(kind, {}) | {"tie_word_embeddings": False}
    config = known(text_config=text, vision_config=vision, **ids, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "language_model" in name or "lm_head" in name or "text_model" in name:
                    continue
                noise = torch.randn_like(parameter)
                if parameter.dim() == 1:  # norms and biases, which would hide mistakes
                    parameter.add_(noise * 0.1)
                else:
                    parameter.copy_(noise * 0.3)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_processor(kind, path)
    return model


def image(width: int, height: int, seed: int = 0) -> bytes:
    """Return a file of an image of coarse noise."""
    chance = np.random.default_rng(seed)
    coarse = Image.fromarray(chance.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    found = BytesIO()
    coarse.resize((width, height)).save(found, "PNG")
    return found.getvalue()


@dataclass(frozen=True)
class Seeing:
    """A checkpoint that sees, and its bundle, in which its own text model drafts."""

    kind: str
    whole: Any
    path: Path
    bundle: Path
    report: ExportReport

    @property
    def placeholder(self) -> str:
        return PLACEHOLDER[self.kind]

    @property
    def image_token(self) -> int:
        return int(tokenizer().token_to_id(IMAGE_TOKEN[self.kind]))

    def prompts(self) -> list[tuple[str, list[bytes]]]:
        """Prompts with images of odd sizes; the first has two and the third none, so that it is read before that.

        The fourth has the tokens of the first, and other images.
        """
        files = [image(121, 85, 0), image(45, 99, 1), image(83, 83, 2)]
        one, long = self.placeholder, " each other" * 9
        return [
            (f"{one}and then{one} are compared with{long}", files[1:]),
            (f"what is {one} this?", files[:1]),
            ("only text", []),
            (f"{one}and then{one} are compared with{long}", files[:2]),
            (f"{'x' * 70}{one}.", files[2:]),
        ]

    def ids(self, prompt: str, pictures: Sequence[Picture]) -> list[int]:
        """Return the tokens of a prompt with its images in their places."""
        reader = ImageReader.open(self.bundle)
        return reader.expand(tokenizer().encode(reader.surrounded(prompt, pictures)).ids, pictures)

    def read(self, images: Sequence[bytes]) -> list[Picture]:
        reader = ImageReader.open(self.bundle)
        return [reader.read(one) for one in images]

    def runs(self, prompt: str, images: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return where tokens of images stand side by side in a prompt."""
        pictures = self.read(images)
        return Sight.of(self.ids(prompt, pictures), pictures, self.image_token).runs

    def said(self, prompt: str, images: Sequence[bytes], most: int, **settings: Any) -> list[int]:
        """Return what transformers says greedily after a prompt with images, as the bundle reads them."""
        given = self._given(prompt, images)
        said = self.whole.generate(**given, do_sample=False, max_new_tokens=most, **settings)
        return said[0, given["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

    def likeliest(self, prompt: str, images: Sequence[bytes]) -> float:
        """Return the log-probability that transformers gives to the likeliest token after a prompt."""
        return float(self.log_probs(prompt, images)[-1].max())

    @torch.no_grad()
    def log_probs(self, prompt: str, images: Sequence[bytes]) -> Tensor:
        """Return what transformers says may follow each token of a prompt [S, V]."""
        found: Tensor = self.whole(**self._given(prompt, images)).logits[0].log_softmax(-1)
        return found

    @torch.no_grad()
    def scores(self, prompt: str, images: Sequence[bytes], text: Sequence[int]) -> Tensor:
        """Return the log-probabilities [S, V] by which transformers' forward pass chooses each token of a text."""
        logits = self.whole(**self._given(prompt, images, text)).logits[0]
        return logits[-len(text) - 1 : -1].log_softmax(-1)  # type: ignore[no-any-return]

    def _given(self, prompt: str, images: Sequence[bytes], text: Sequence[int] = ()) -> dict[str, Tensor]:
        pictures = self.read(images)
        tokens = torch.tensor([[*self.ids(prompt, pictures), *text]])
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if pictures:
            given |= as_transformers(self.kind, pictures)
            seen = (tokens == self.image_token).long()
            given |= {TYPES[self.kind]: seen} if self.kind in TYPES else {}
        return given


TYPES = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}


def as_transformers(kind: str, pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """Return the images of a prompt as transformers' model takes them."""
    pixels = [torch.from_numpy(one.inputs["pixels"]) for one in pictures]
    if kind.startswith("qwen"):
        grids = [torch.from_numpy(one.inputs["grid"]) for one in pictures]
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(grids)}
    if kind in ("idefics3", "smolvlm"):
        return {"pixel_values": torch.cat(pixels)[None]}
    if kind not in ("mistral3", "llava-pixtral"):
        return {"pixel_values": torch.cat(pixels)}
    sizes = [list(one.shape[2:]) for one in pixels]
    height, width = map(max, zip(*sizes, strict=True))
    padded = [pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in pixels]
    return {"pixel_values": torch.cat(padded), "image_sizes": torch.tensor(sizes)}


def export_seeing(kind: str, folder: Path) -> Seeing:
    whole = seeing(kind, folder / "whole")
    report = export_bundle(folder / "whole", folder / "bundle", folder / "whole", images=True)
    return Seeing(kind, whole, folder / "whole", folder / "bundle", report)
