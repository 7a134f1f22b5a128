"""The command `export-models`: from one or two checkpoints to a bundle."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...export.pipeline import ExportReport

EXPORT_ONLY = ("transformers", "safetensors", "onnx", "onnx_ir", "onnxscript", "huggingface_hub")
UNITS = ("B", "KB", "MB", "GB")
EXIT_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 130, 143


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    begun = time.perf_counter()

    def progress(stage: str) -> None:
        print(f"[{time.perf_counter() - begun:6.1f} s] {stage}", file=sys.stderr, flush=True)

    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        progress("loading the libraries")
        from ...engines import TrtSpecError

        try:
            report = _export(arguments, progress)
        except TrtSpecError as error:
            return _fail(str(error))
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXPORT_ONLY:
                raise
            return _fail(f"exporting needs {package}, which is not installed; pip install 'trt-spec[export]'")
    except KeyboardInterrupt:
        print("export-models: interrupted; nothing was left behind", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _Terminated:
        print("export-models: terminated; nothing was left behind", file=sys.stderr)
        return EXIT_TERMINATED
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(table(report))
    return 0


def _fail(sentence: str) -> int:
    print(f"export-models: error: {sentence}", file=sys.stderr)
    return EXIT_ERROR


def table(report: "ExportReport") -> str:
    """What was written, a line for each model."""
    rows = [("model", "from", "parameters", "nodes", "size", "dtype", "weights", "worst error", "seconds")]
    for model in report.models:
        entry = model.entry
        rows.append(
            (
                model.role,
                entry.name,
                f"{entry.parameters:,}",
                str(model.nodes),
                in_bytes(model.weight_bytes),
                entry.contract.dtype,
                entry.weights,
                _error(entry.check),
                f"{model.seconds:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(model.entry.check.get("as_float32_copy") for model in report.models):
        lines.append("checked as float32 copy: the same weights file, computed in float32")
    lines += [_quality(model.role, model.entry.check["quality"]) for model in report.models if model.entry.check]
    if report.overlap:
        accepted = ", ".join(f"{alpha:.3f} at temperature {t:g}" for t, alpha in report.overlap.items())
        lines.append(f"acceptance expected of the draft on the text: {accepted}")
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"{report.path}: sequences up to {report.max_length} tokens, written in {report.seconds:.1f} s")
    return "\n".join(lines)


def _quality(role: str, quality: dict[str, Any]) -> str:
    return (
        f"{role} on a text of {quality['tokens']} tokens: perplexity {quality['perplexity']:.4g}, of the checkpoint "
        f"{quality['checkpoint_perplexity']:.4g}; KL {quality['divergence']:.1e}; worst logit off by "
        f"{quality['worst_logit_error']:.1e} standard deviations"
    )


def in_bytes(size: float) -> str:
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {UNITS[-1]}"


def _error(check: dict[str, Any]) -> str:
    if not check:
        return "not checked"
    return f"{check['worst_error']:.1e} of {check['tolerance']:.1e} allowed"


def _export(arguments: argparse.Namespace, progress: Any) -> "ExportReport":
    from ...export.passes.quantise import Quantisation
    from ...export.pipeline import export_bundle
    from ..text_files import read_text

    return export_bundle(
        target=arguments.target,
        out=arguments.out,
        draft=arguments.draft,
        max_length=arguments.max_length,
        dtype=arguments.dtype,
        weights=Quantisation(arguments.weights, arguments.wide_head, arguments.wide_embedding),
        draft_weights=Quantisation(arguments.draft_weights, arguments.wide_head, arguments.wide_embedding),
        text=None if arguments.text is None else read_text(Path(arguments.text), "text"),
        check=not arguments.no_check,
        progress=progress,
    )


class _Terminated(BaseException):
    """SIGTERM, as an exception: everything half-written is cleaned up on its way out."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="export-models",
        description="Export a target model, and a draft model for it, to one bundle that trt-spec runs.",
    )
    parser.add_argument(
        "--target", required=True, metavar="DIR_OR_ID", help="checkpoint, or its name on the Hugging Face Hub"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="BUNDLE",
        help="the directory to write; an older bundle there is replaced",
    )
    parser.add_argument("--draft", metavar="DIR_OR_ID", help="a small checkpoint with the target's tokenizer")
    parser.add_argument("--max-length", type=int, metavar="N", help="longest sequence; all positions by default")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of weights and cache"
    )
    for flag, model in (("--weights", "target's"), ("--draft-weights", "draft's")):
        parser.add_argument(
            flag,
            choices=("none", "int8", "int4"),
            default="none",
            help=f"store the {model} matrices in blocks of small integers (embeddings never smaller than int8)",
        )
    parser.add_argument(
        "--wide-head", action="store_true", help="do not quantise the vocabulary projection (nor a tied embedding)"
    )
    parser.add_argument(
        "--wide-embedding", action="store_true", help="do not quantise the embedding (nor a tied vocabulary projection)"
    )
    parser.add_argument("--text", metavar="FILE", help="measure perplexity and acceptance on this text")
    parser.add_argument("--no-check", action="store_true", help="do not compare the graphs with the checkpoints")
    return parser


if __name__ == "__main__":
    sys.exit(main())
