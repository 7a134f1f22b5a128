"""The command `export-models`: from the checkpoints of a target and its drafts to a bundle."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engines import ExportError
from ...engines.errors import counted
from ..console import progress
from ..exported import shown
from ..flags.revision import add_revision_flag, at_revision
from ..flags.sampling import positive
from ..program import EXPORT_ONLY, Parser, exit_code, version_of
from ..text_files import read_text

if TYPE_CHECKING:
    from ...export.writing.report import ExportReport

PROGRAM = "export-models"


def main(argv: Sequence[str] | None = None) -> int:
    before: dict[Path, int | None] = {}

    def left() -> str:
        new = [out for out, folder in before.items() if _folder_at(out) != folder]
        return f"; {new[0]} was complete by then" if new else "; nothing was left behind"

    return exit_code(PROGRAM, partial(_run, argv, before), left)


def _folder_at(out: Path) -> int | None:
    """Return what tells a bundle from the one that takes its place."""
    return out.stat().st_ino if out.exists() else None


def _run(argv: Sequence[str] | None, before: dict[Path, int | None]) -> int:
    arguments = _parser().read_all(argv)
    out = Path(arguments.out)
    text = None if arguments.text is None else read_text(Path(arguments.text), "text")
    _refuse_absent(arguments, out)
    before[out] = _folder_at(out)
    with progress("export", total=stages(arguments), ticking=True) as show:
        show("loading the libraries")
        report = _export(arguments, text, show)
    print(shown(report))
    return 0


def stages(arguments: argparse.Namespace) -> int:
    """Count the stages that the exporter will name: each model is loaded, traced, written and perhaps checked."""
    kinds = [arguments.weights, *[arguments.draft_weights] * len(arguments.draft)]
    checks = 0 if arguments.no_check else sum(2 + (kind not in ("auto", "none")) for kind in kinds)
    of_images = (3 + int(not arguments.no_check)) * int(arguments.images)
    return 3 + 3 * len(kinds) + checks + of_images


def _refuse_absent(arguments: argparse.Namespace, out: Path) -> None:
    """Refuse paths and names before the libraries are loaded, which takes many seconds on a slow machine."""
    from ...export.checkpoints.finding import require_pair_found
    from ...export.checkpoints.lora import require_adapter
    from ...export.writing.aside import refuse_foreign

    for library in EXPORT_ONLY:
        if find_spec(library) is None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
    refuse_foreign(out)
    require_pair_found(at_revision(arguments.target, arguments.revision), arguments.draft, arguments.max_length)
    if (count := len(arguments.draft_lora)) > len(arguments.draft):
        raise ExportError(
            f"{counted(count, 'adapter')} for {counted(len(arguments.draft), 'draft')}, expected one for each at most"
        )
    for adapter in filter(None, (arguments.lora, *arguments.draft_lora)):
        require_adapter(Path(adapter))


def _export(arguments: argparse.Namespace, text: str | None, show: Any) -> "ExportReport":
    from ...export import export_bundle
    from ...export.passes.quantise import Quantisation

    return export_bundle(
        target=at_revision(arguments.target, arguments.revision),
        out=arguments.out,
        draft=arguments.draft,
        max_length=arguments.max_length,
        dtype=arguments.dtype,
        weights=Quantisation(arguments.weights, arguments.wide_head, arguments.wide_embedding),
        draft_weights=Quantisation(arguments.draft_weights, arguments.wide_head, arguments.wide_embedding),
        text=text,
        check=not arguments.no_check,
        progress=show,
        lora=arguments.lora,
        draft_lora=arguments.draft_lora,
        adapters=arguments.adapters,
        adapter_rank=arguments.adapter_rank,
        cache=arguments.cache,
        images=arguments.images,
        shards=arguments.tensor_parallel,
        exact_sums=arguments.exact_sums,
    )


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Turn a checkpoint, and smaller ones that draft for it, into a bundle: the folder of ONNX graphs "
        "that trt-spec runs. Each graph is compared with its checkpoint before the bundle is written.",
    )
    parser.add_argument("--version", action="version", version=version_of(PROGRAM))
    parser.add_argument(
        "--target",
        required=True,
        metavar="DIR_OR_ID",
        help="the checkpoint of the model whose text you want: a folder, or a name on the Hugging Face Hub",
    )
    parser.add_argument(
        "--out", required=True, metavar="BUNDLE", help="the folder to write; an older bundle there is replaced"
    )
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="DIR_OR_ID",
        help="the checkpoint of a smaller model, which proposes tokens to the target; may be repeated, for up to four "
        "of them, which are drafters model, model2 and so on, or common and text if it has another tokenizer",
    )
    add_revision_flag(parser, "the target")
    parser.add_argument("--lora", metavar="DIR", help="a LoRA adapter, as PEFT writes it, to merge into the target")
    parser.add_argument(
        "--draft-lora",
        action="append",
        default=[],
        metavar="DIR",
        help="one to merge into a draft; may be repeated, in the order of the drafts",
    )
    parser.add_argument(
        "--adapters",
        type=positive,
        default=0,
        metavar="N",
        help="leave room for so many LoRA adapters at a time, which requests name while serving (default: none)",
    )
    parser.add_argument(
        "--adapter-rank",
        type=positive,
        default=16,
        metavar="R",
        help="the highest rank that one may have (default 16)",
    )
    parser.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="the most tokens of prompt and output together (default: as many as the models have positions for)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="number type of weights and cache (default float32)",
    )
    parser.add_argument(
        "--cache",
        choices=("full", "int8", "fp8"),
        default="full",
        help="keep keys and values of target and drafts in eight bits, with a scale for each token and head, in half "
        "the memory of float16; int8 is for ONNX Runtime and torch, fp8 for torch (default full: as --dtype says)",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="let the target see: write its vision tower, too, so that prompts may have images",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="split the target into so many shards, which as many devices run together in engine torch (default 1)",
    )
    parser.add_argument(
        "--exact-sums",
        action="store_true",
        help="let shards compute and sum in float64 what they sum, so that the order of a sum changes no token; slower",
    )
    for flag, model in (("--weights", "target's"), ("--draft-weights", "drafts'")):
        parser.add_argument(
            flag,
            choices=("auto", "none", "int8", "int4", "fp8", "nvfp4"),
            default="auto",
            help=f"quantise the {model} matrices to blocks of small integers, or to FP8 or NVFP4, which are meant for "
            "TensorRT and leave embeddings wide; embeddings never go below int8 (default auto: the blocks of a GGUF "
            "file of Q4_0, Q4_1, Q4_K, Q6_K or Q8_0 are kept, else none)",
        )
    parser.add_argument(
        "--wide-head", action="store_true", help="do not quantise the output projection, nor an embedding tied to it"
    )
    parser.add_argument(
        "--wide-embedding",
        action="store_true",
        help="do not quantise the embedding, nor an output projection tied to it",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="measure perplexity and expected acceptance on this text (default: a short one that is shipped)",
    )
    parser.add_argument("--no-check", action="store_true", help="do not compare the graphs with their checkpoints")
    return parser


if __name__ == "__main__":
    sys.exit(main())
