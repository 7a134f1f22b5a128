"""Serve a bundle to many clients at once, by the APIs of OpenAI and Anthropic: completions, chats, responses, messages.

SIGTERM ends it gracefully: it takes nothing new, finishes what runs, and exits with 0. It exits with 70 if the
decoder has failed, or hangs on SIGTERM.
"""

import argparse
import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

from ...engines import Bundle, EngineError, RequestError
from ...runtime.acceptance.parameter_fields import ParameterFields
from ...runtime.acceptance.ranges import refuse_out_of_range
from ...runtime.state.asked import BESIDE
from ...runtime.state.needs import comes_by_export
from ..console import say
from ..extras import install_command
from ..flags.adapters import refuse_adapters, refuse_room
from ..flags.controller import draft_length, refuse_drafting, refuse_lacking
from ..flags.engine import engine_name, open_decoder
from ..flags.revision import at_revision
from ..flags.serve import add_serve_flags
from ..serving.certificates import tls_context
from ..serving.keys import Keys
from ..serving.listening import address, listen, refuse_unheard
from ..serving.marks import refuse_parser
from ..serving.renewal import renewed
from ..text_files import read_text

if TYPE_CHECKING:
    from ..serving.tracing import Traces

TRACED = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serve_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    # What a flag or a file says wrong is reported before anything heavy is loaded.
    keys = Keys(arguments.api_key, arguments.api_key_file)
    if not keys and (arguments.requests_per_minute or arguments.rows_per_key):
        raise RequestError("--requests-per-minute and --rows-per-key bound each key, but there is none; give --api-key")
    certificate = arguments.ssl_certfile, arguments.ssl_keyfile
    if arguments.ssl_keyfile and not arguments.ssl_certfile:
        raise RequestError("--ssl-keyfile is the key of --ssl-certfile, which is missing; give both")
    tls = tls_context(*certificate) if arguments.ssl_certfile else None
    template = None if arguments.chat_template is None else read_text(arguments.chat_template, "chat template")
    if arguments.reasoning_parser is not None:
        refuse_parser(arguments.reasoning_parser)
    refuse_drafting(arguments)
    engine_name(arguments)
    _refuse_adapters(arguments)
    refuse_unheard(arguments.host, [port for port in (arguments.port, arguments.metrics_port) if port is not None])
    _refuse_model(arguments)
    files = arguments.api_key_file is not None or tls is not None
    with renewed(keys, tls, certificate) if files else nullcontext() as read_again:
        return _serve(arguments, keys, tls, template, read_again)


def _serve(
    arguments: argparse.Namespace,
    keys: Keys,
    tls: SSLContext | None,
    template: str | None,
    read_again: Callable[[], None] | None,
) -> int:
    try:
        from ..serving.access_log import set_up_logging
        from ..serving.allowances import Allowances
        from ..serving.app import make_app, make_metrics_app
        from ..serving.server import Beside, serve
        from ..serving.service import open_service
    except ModuleNotFoundError as error:
        raise EngineError(f"serving needs {error.name}, which is not installed; {install_command('serve')}") from error

    allowances = Allowances(arguments.requests_per_minute, arguments.rows_per_key)
    traces = _traces()
    arguments.bundle = bundle = _bundle(arguments)
    defaults = {"rule": arguments.rule} | (_recommended(bundle) if arguments.generation_config else {})
    port = arguments.metrics_port
    with (
        nullcontext() if traces is None else closing(traces),
        listen(arguments.host, arguments.port) as listener,
        nullcontext() if port is None else listen(arguments.host, port) as aside,
        open_decoder(
            arguments, arguments.max_batch, arguments.cache_memory, arguments.prefix_memory or None
        ) as decoder,
    ):
        set_up_logging(arguments.log_format, arguments.log_level)
        service = open_service(
            decoder,
            arguments.max_waiting,
            names=arguments.served_model_name,
            chat_template=template,
            reasoning_parser=arguments.reasoning_parser,
            draft_length=draft_length(arguments),
            drafter=arguments.drafter,
            defaults=defaults,
            traces=traces,
            adapters=arguments.adapter,
            adapter_root=arguments.adapters_from,
            image_hosts=arguments.image_hosts,
        )
        beside = None if aside is None else Beside(make_metrics_app(service), aside)
        app = make_app(service, keys, arguments.log_prompts, arguments.allow_origin, allowances, beside is not None)
        line = f"trt-spec serves {service.name} with {decoder.engine} on {arguments.device} at {address(listener, tls)}"
        line += "" if aside is None else f" and metrics at {address(aside, tls)}"
        return serve(app, service, listener, arguments.drain_seconds, lambda: say(line), tls, read_again, beside)


def _refuse_adapters(arguments: argparse.Namespace) -> None:
    folders = [folder for _, folder in arguments.adapter]
    bundle, root = arguments.model or arguments.bundle, arguments.adapters_from
    if not folders and root is None:
        return
    if bundle is None or not _is_bundle(arguments):
        raise RequestError("adapters need a bundle that has room for them; export one with export-models --adapters")
    refuse_adapters(folders, Path(bundle), arguments.engine)
    refuse_room(Path(bundle), arguments.engine)
    if root is not None and not root.is_dir():
        raise RequestError(f"--adapters-from {root} is no folder; name one")
    named = [*arguments.served_model_name, *(name for name, _ in arguments.adapter)]
    if twice := [name for name in named if named.count(name) > 1]:
        raise RequestError(f"the name {twice[0]!r} is given twice; give each model and adapter one of its own")


def _refuse_model(arguments: argparse.Namespace) -> None:
    """Refuse a model that is not there, and flags that do not go with it."""
    from ..making.kept_bundles import TARGET, refuse_unfound, refuse_unshipped

    if arguments.model is not None and arguments.bundle is not None:
        raise RequestError(f"{arguments.model} and --bundle {arguments.bundle} both name the model; leave one out")
    if not _is_bundle(arguments):
        for drafter in (arguments.drafter or "").split(BESIDE):
            if comes_by_export(drafter) and not arguments.draft:
                raise RequestError(
                    f"--drafter {drafter} runs what --draft names, which is missing; give it, or use --drafter lookup"
                )
        refuse_unfound(*_checkpoints(arguments), arguments.max_length, arguments.weights, arguments.tensor_parallel)
        _refuse_recommended(arguments)
        return
    given = {"revision": arguments.revision, "weights": arguments.weights, "draft": arguments.draft}
    if asked := [f"--{name}" for name, value in given.items() if value not in (None, "auto", [])]:
        raise RequestError(f"{asked[0]} is for checkpoints, but a bundle is served; leave it out")
    if (model := arguments.model or arguments.bundle) is None:
        refuse_unshipped(arguments.drafter)
        if arguments.max_length is not None:
            refuse_unfound(str(TARGET), [], arguments.max_length, arguments.weights)
        return
    bundle = Bundle.read(Path(model))
    bundle.require_files()
    if arguments.tensor_parallel not in (1, shards := bundle.target.contract.shards):
        raise RequestError(
            f"bundle {model} is in {shards} shards, not in {arguments.tensor_parallel}; leave --tensor-parallel out, "
            "or export it so"
        )
    if arguments.max_length is not None:
        bundle.limited(arguments.max_length)
    if arguments.generation_config:
        _recommended(bundle)
    refuse_lacking(bundle, arguments, draft_length(arguments), arguments.max_batch)


def _refuse_recommended(arguments: argparse.Namespace) -> None:
    """Refuse --generation-config where the checkpoint recommends nothing."""
    from ...export.checkpoints.recommended import recommended_here

    if arguments.generation_config and (found := recommended_here(arguments.model)) is not None:
        if not found:
            raise RequestError(
                f"checkpoint {arguments.model} has no generation_config.json that recommends a sampling; leave "
                "--generation-config out"
            )
        refuse_out_of_range(ParameterFields(**found))


def _is_bundle(arguments: argparse.Namespace) -> bool:
    return arguments.model is None or (Path(arguments.model) / "manifest.json").exists()


def _checkpoints(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Name the target and the drafts of which a bundle is made."""
    return at_revision(arguments.model, arguments.revision), arguments.draft


def _traces() -> "Traces | None":
    """Open what OpenTelemetry's own variables ask for."""
    asking = next((name for name in TRACED if os.environ.get(name)), None)
    if asking is None or os.environ[asking] == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from ..serving.tracing import open_traces
    except ModuleNotFoundError as error:
        raise EngineError(
            f"{asking} asks for traces, which need {error.name}, which is not installed; {install_command('otel')}, or "
            "set OTEL_SDK_DISABLED=true"
        ) from error
    return open_traces()


def _bundle(arguments: argparse.Namespace) -> Bundle:
    """Open the bundle that was named, or make that of the checkpoint."""
    from ..making.kept_bundles import DEMO_DRAFTS, bundle_of, demo_bundle

    longest = arguments.max_length
    if not _is_bundle(arguments):
        return bundle_of(*_checkpoints(arguments), say, longest, arguments.weights, arguments.tensor_parallel)
    model = arguments.model or arguments.bundle
    shipped = arguments.drafter if arguments.drafter in DEMO_DRAFTS else "model"
    bundle = demo_bundle(say, shipped) if model is None else Bundle.open(model)
    return bundle if longest is None else bundle.limited(longest)


def _recommended(bundle: Bundle) -> dict[str, Any]:
    if not bundle.tokenizer.sampling:
        raise RequestError(
            f"bundle {bundle.path} keeps no defaults of a generation_config.json, or was exported before they were "
            "kept; export it again, or leave --generation-config out"
        )
    found: dict[str, Any] = dict(bundle.tokenizer.sampling)
    refuse_out_of_range(ParameterFields(**found))  # now, and not with every request
    return found
