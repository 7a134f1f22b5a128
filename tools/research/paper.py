"""Measure with the shipped models what the paper of speculative decoding measures: α of many drafts, and speed.

    python -m trt_spec.tools.research.paper --work DIR [--json OUT] [--processor-time]

As there α is the mean of Σ min(p, q) on tokens that the target itself says, at temperature 0 between distributions that
are all on one token. Unigrams and bigrams are counted on the standard library: its sources for pycode, its docstrings
for the telegrams. Speeds are those of the shipped T5 on telegrams that it has not learned from, its decoder
deepened by layers that add nothing: the texts and α are its own, the cost that of a larger model. Settings take turns.

`paper_report` shows what this wrote last, beside the paper's tables.
"""

import argparse
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from ...export.checking.bigram import Bigram, shared
from ...export.checking.quality import overlap
from ...export.pipeline import export_bundle
from ...runtime import Decoder, Output, SamplingParams
from ..console import say
from ..example_sources import PromptedDecoder
from ..flags.sampling import add_number
from ..making.kept_bundles import DEMO_DRAFTS, TARGET, demo_bundle
from ..measuring.bench import bench
from ..program import program
from ..prompts.shipped import bench_prompts
from ..theory.lines import speed_up
from ..timing.clock import processor_time
from ..whole_file import outputs
from .paper_tables import LENIENCES
from .shipped import TELEGRAM_DRAFT, TELEGRAMS, telegram_bundle
from .telegrams import is_held_out, library_sentences, telegram
from .train_pair import source_files, texts

LAYERS = 36  # of the deepened decoder
LENGTHS = (3, 5, 7)
TEMPERATURES = (0.0, 1.0)
LONG, NEW_TOKENS, TIMED = 40, 32, 16  # tokens of a sentence that is timed, of them that are written, and sentences
SAID = 64  # telegrams on which α is measured
BEGIN = 0  # comes before a text of both pairs, and is not said in one
COUNTED = 2**19  # tokens on which n-grams are counted, at most
CONTINUED = 128  # tokens that are written after a prompt


@dataclass(frozen=True)
class Said:
    """A text that a target said: of which source, if any, and after which tokens."""

    text: Sequence[int]
    after: Sequence[int]
    source: Sequence[int] = ()


def deepened(checkpoint: Path, out: Path, layers: int) -> Path:
    """Write a T5 with more layers in its decoder, which add nothing: it says the same and takes longer."""
    config = json.loads((checkpoint / "config.json").read_text())
    own, generator = config["num_decoder_layers"], torch.Generator().manual_seed(0)
    weights = {name: weight.float() for name, weight in load_file(checkpoint / "model.safetensors").items()}
    for layer in range(own, layers):
        like = f"decoder.block.{own - 1}."
        for name in [name for name in weights if name.startswith(like)]:
            noise = 0.01 * torch.randn(weights[name].shape, generator=generator)  # no two matrices are equal
            silent = name.endswith((".o.weight", ".wo.weight"))
            added = torch.zeros_like(noise) if silent else weights[name] + noise
            weights[name.replace(like, f"decoder.block.{layer}.")] = added
    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"num_decoder_layers": layers, "dtype": "float32"}))
    return out


@torch.no_grad()
def measure_alphas(
    names: Sequence[str], models: Sequence[Any], counted: Tensor, said: Mapping[float, Sequence[Said]]
) -> dict[str, Any]:
    """α of n-grams and of a draft by temperature, and by lenience what it would be where texts were sampled."""
    vocab_size = models[0].config.vocab_size
    bigram = Bigram(counted, vocab_size)
    unigram = shared(counted[counted != BEGIN], torch.full((vocab_size,), 1 / vocab_size))
    alphas, lenient = defaultdict(list), {}
    for temperature, texts_said in said.items():
        p, q = (torch.cat([_logits(model, one) for one in texts_said]) for model in models)
        before = [token for one in texts_said for token in (one.after[-1], *one.text[:-1])]
        follows = torch.stack([bigram.after(token) for token in before]).log()
        distributions = {"unigram": unigram.log().expand_as(p), "bigram": follows, names[1]: q}
        for draft, distribution in distributions.items():
            alphas[draft].append(rounded(overlap(p, distribution, temperature)))
            if temperature == 1:
                both = p.softmax(-1), distribution.softmax(-1)
                lenient[draft] = [rounded(lenient_overlap(*both, lenience)) for lenience in LENIENCES]
    return {
        "alphas": [[names[0], draft, *each] for draft, each in alphas.items()],
        "lenient": [[names[0], draft, *each] for draft, each in lenient.items()],
        "tokens": [sum(len(one.text) for one in texts_said) for texts_said in said.values()],
    }


def _logits(model: Any, said: Said) -> Tensor:
    """Return what a model of transformers thinks where the text was said [L, V]."""
    tokens = torch.tensor([[*said.after, *said.text[:-1]]])
    if said.source:
        logits = model(input_ids=torch.tensor([said.source]), decoder_input_ids=tokens).logits
    else:
        logits = model(tokens).logits
    found: Tensor = logits[0, len(said.after) - 1 :]
    return found


def lenient_overlap(p: Tensor, q: Tensor, lenience: float) -> float:
    """Return the mean α(l) of these distributions [L, V]."""
    return float(torch.minimum(p / lenience, q).sum(-1).mean())


def rounded(value: float) -> float:
    return round(value, 4)


def python_alphas() -> dict[str, Any]:
    """α of the demo pair and of n-grams, on Python that its target continues."""
    from transformers import AutoModelForCausalLM

    pair = TARGET, DEMO_DRAFTS["model"]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in pair]
    with Decoder.open(demo_bundle(say), max_batch=1) as decoder:
        prompts = [decoder.tokenizer.encode(one).ids for kind in ("python", "code") for one in bench_prompts(kind, 0)]
        said = {
            temperature: [
                Said(out.token_ids, prompt)
                for out, prompt in zip(_written(decoder, temperature, prompts=prompts), prompts, strict=True)
            ]
            for temperature in TEMPERATURES
        }
        counted = _counted(decoder.tokenizer, texts(source_files()[0]))
    return measure_alphas([one.name for one in pair], models, counted, said)


def telegram_alphas(decoder: Decoder, learned: Sequence[str], held_out: Sequence[str]) -> dict[str, Any]:
    """α of the shipped T5 and of n-grams, on what the target writes of telegrams."""
    from transformers import AutoModelForSeq2SeqLM

    pair = TELEGRAMS, TELEGRAM_DRAFT
    models = [AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32) for path in pair]
    sources = [decoder.tokenizer.encode(telegram(one)).ids for one in held_out[:SAID]]
    said = {
        temperature: [
            Said(out.token_ids, [BEGIN], source)
            for out, source in zip(_written(decoder, temperature, sources=sources), sources, strict=True)
        ]
        for temperature in TEMPERATURES
    }
    counted = _counted(decoder.tokenizer, learned)
    return measure_alphas([one.name for one in pair], models, counted, said)


def _written(decoder: Decoder, temperature: float, **given: Any) -> list[Output]:
    params = SamplingParams(max_new_tokens=CONTINUED, temperature=temperature, seed=0)
    return decoder.generate(**given, params=params, draft_length=0, drafter="none")


def _counted(tokenizer: Tokenizer, texts: Iterable[str]) -> Tensor:
    """Return the tokens of these texts, each after what begins it, up to COUNTED."""
    tokens = chain.from_iterable((BEGIN, *tokenizer.encode(text).ids) for text in texts)
    return torch.tensor(list(islice(tokens, COUNTED)))


def measure_speed(work: Path, sentences: Sequence[str], repeats: int) -> dict[str, Any]:
    """Time each length in turn with none, on sentences that are long enough for all of them."""
    prompts, bundle = work / "telegrams.jsonl", work / "deepened-bundle"
    if not bundle.exists():
        export_bundle(deepened(TELEGRAMS, work / "deepened", LAYERS), bundle, TELEGRAM_DRAFT, progress=say)
    prompts.write_text("".join(json.dumps({"prompt": telegram(one)}) + "\n" for one in sentences))
    runs = []
    with PromptedDecoder.open(bundle, max_batch=1) as decoder:
        for temperature in TEMPERATURES:
            flags = ("--draft-lengths", ",".join(map(str, LENGTHS)), "--max-new-tokens", NEW_TOKENS)
            asked = ("--prompts", prompts, "--temperature", temperature, "--repeats", repeats)
            result = bench(decoder, *flags, *asked)
            runs += [
                {
                    "temperature": temperature,
                    "draft_length": one["draft_length"],
                    "alpha": rounded(one["acceptance"]),
                    "c": rounded(one["c"]),
                    "v": rounded(one["v"]),
                    "speed": rounded(speed_up(one["acceptance"], one["draft_length"], one["c"])),
                    "predicted": rounded(one["predicted"]),
                    "measured": rounded(one["speed_up"]),
                    "tokens_per_round": rounded(one["tokens_per_round"]),
                }
                for one in result["settings"]
                if one["draft_length"]
            ]
    return {"runs": runs, "conditions": result["conditions"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="where the deepened checkpoint and its bundle are kept"
    )
    add_number(parser, "--repeats", 5, "times each is measured")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count the processor's time and not the clock's, for a core that other work shares; run it on one",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was found to this file as well")


def run(arguments: argparse.Namespace) -> int:
    with outputs(arguments, "json") as out:
        arguments.work.mkdir(parents=True, exist_ok=True)
        sentences = library_sentences()
        held_out = [one for one in sentences if is_held_out(one)]
        learned = [one for one in sentences if not is_held_out(one)]
        with Decoder.open(telegram_bundle(say), max_batch=1) as decoder:
            lengths = [len(decoder.tokenizer.encode(one).ids) for one in held_out]
            alphas = {"pycode": python_alphas(), "telegrams": telegram_alphas(decoder, learned, held_out)}
        timed = [one for one, length in zip(held_out, lengths, strict=True) if length >= LONG][:TIMED]
        with processor_time() if arguments.processor_time else nullcontext():
            speeds = measure_speed(arguments.work, timed, arguments.repeats)
        found = json.dumps(alphas | speeds | {"processor_time": arguments.processor_time}, indent=1)
        print(found)
        if out:
            print(found, file=out["json"])
    return 0


main = program("paper", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
