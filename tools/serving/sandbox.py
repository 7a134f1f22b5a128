"""Runs a chat template where it can do no harm: in jinja2's sandbox, with what transformers gives it and no more.

It has a limited time, and writes a limited text.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from time import perf_counter
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ...engines import EngineError, RequestError
from ...engines.errors import one_line

MOST_SECONDS = 1.0
MOST_CHARACTERS = 16 * 2**20
MOST_DEPTH = 100


class Raised(TemplateError):
    """A template refuses the messages."""


class TooLong(Exception):
    """A template takes too long, or writes too much."""


class GenerationTag(Extension):
    """`{% generation %}` marks what an assistant says, for training; here its body is just shown."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class SafeNamespace(Namespace):
    """A namespace without attributes that begin with an underscore."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **fields)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class Dict:
    """`dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Bounded(NodeTransformer):
    """Makes every pass of a loop look at the clock, and every concatenation at the length."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        tick = nodes.Call(nodes.Name("__tick", "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        joined = nodes.Call(nodes.Name("__join", "load"), node.nodes, [], None, None)
        return self.generic_visit(joined.set_lineno(node.lineno))


class Sandbox(ImmutableSandboxedEnvironment):
    """Limits what a template may spend, since a thread cannot be stopped from outside."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Bounded().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = _size(left), _size(right)
        if operator == "**" or (sum(sizes) if operator == "+" else sizes[0] * sizes[1]) > MOST_CHARACTERS:
            raise TooLong
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> float:
    """Return the length of a text or list, or how often a number would repeat it."""
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def _join(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise TooLong
    return "".join(texts)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}")


def _raise(message: str) -> None:
    raise Raised(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class SafeTemplate:
    """A chat template that was read, and can be written."""

    def __init__(self, source: str) -> None:
        sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        sandbox.filters["tojson"] = _to_json
        sandbox.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "__join": _join,
            "dict": Dict(),
            "namespace": SafeNamespace,
        }
        try:
            self._template = sandbox.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise RequestError(f"the chat template is not one ({one_line(error)}); correct it") from error

    def write(self, context: Mapping[str, Any]) -> str:
        """Return what the template writes of messages and whatever else there is; refuse what goes wrong."""
        began = perf_counter()

        def tick() -> None:
            if perf_counter() - began > MOST_SECONDS:
                raise TooLong

        parts, size = [], 0
        try:
            for part in self._template.generate({**context, "__tick": tick}):
                parts.append(part)
                size += len(part)
                tick()
                if size > MOST_CHARACTERS:
                    raise TooLong
        except Raised as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        except TooLong:
            raise EngineError(
                f"the chat template takes more than {MOST_SECONDS:g} s or writes too much; correct the template"
            ) from None
        except SecurityError as error:
            raise EngineError(
                f"the chat template does what no template may ({one_line(error)}); correct the template"
            ) from error
        except Exception as error:  # a template may fail in any way that Python can
            if isinstance(error, RecursionError):
                _require_flat(list(context.values()))
            raise EngineError(
                f"the chat template fails on these messages ({type(error).__name__}: {one_line(error)}); correct it"
            ) from error
        return "".join(parts)


def _require_flat(value: Any) -> None:
    """Refuse a JSON value that is nested as deeply as only what is meant to do harm."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [part for one in level if isinstance(one, dict | list) for part in _parts(one)]
        if not level:
            return
    raise RequestError("the messages or tools are nested too deeply; send flatter ones", "messages")


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
