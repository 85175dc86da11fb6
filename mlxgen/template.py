"""Chat templates, rendered within limits. They come with models, so they are treated as somebody else's program.

Jinja's immutable sandbox keeps a template away from the interpreter. It doesn't keep it from `'a' * 2000000000`, from
loops in loops, or from `9 ** 9 ** 9`. So here every way to make something large has a price, paid out of a budget
before it is made, and every loop pass, macro call, filter and test looks at the clock:

- operators `*`, `**`, `+`, `%`, `~`, slices, `range`;
- string methods and filters whose result is longer than what goes in (padding, `replace`, `join`, `format`, `indent`);
- everything that is written, also inside `set` blocks and macros; nested lists before they are turned to text.

What a template can still do is be slow for `MAX_SECONDS`, in steps of one operation on strings of `MAX_CHARS`.
Globals, filters and whitespace rules are those of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, update_wrapper
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mlxgen.errors import TemplateError

MAX_TEMPLATE_CHARS: Final = 4 << 20
MAX_CHARS: Final = 64 << 20
MAX_BUDGET: Final = 1 << 30
MAX_SECONDS: Final = 10.0
MAX_STEPS: Final = 20_000_000
MAX_WIDTH: Final = 10_000
_MAX_INT_BITS: Final = 4096
# In characters: what an element of a list takes in memory, and what it takes, in time mostly, to print one.
_ELEMENT_SIZE: Final = 16
_ELEMENT_COST: Final = 256


class TemplateRefusal(TemplateError):
    """The template itself said no (`raise_exception`), or failed on this conversation; another form of it may do."""


class _LimitError(SecurityError):
    pass


class _Meter:
    """What one rendering has used so far. Made for one call, used by one thread."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self._left = MAX_BUDGET
        self._steps = MAX_STEPS
        self._deadline = time.monotonic() + MAX_SECONDS
        self._written = 0

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise _LimitError(f"more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise _LimitError(f"more than {MAX_SECONDS:g} seconds")

    def pay(self, num_chars: int) -> None:
        """Charge for one value of this size, before it is made."""
        if num_chars > MAX_CHARS:
            raise _LimitError(f"a value of {num_chars} characters, the limit is {MAX_CHARS}")
        self._left -= num_chars
        if self._left < 0:
            raise _LimitError(f"more than {MAX_BUDGET} characters of intermediate text")

    def write(self, num_chars: int) -> None:
        self._written += num_chars
        if self._written > MAX_CHARS:
            raise _LimitError(f"more than {MAX_CHARS} characters of output")

    def text(self, value: Any) -> str:
        """`str(value)`, after making sure that it is of bearable size."""
        if isinstance(value, str):
            return value
        self.pay(_cost(value))
        return str(value)


_METER: ContextVar[_Meter] = ContextVar("mlxgen_template_meter")


def _cost(value: Any) -> int:
    """About how many characters `value` takes as text. Counts a list once per place it appears in, as printing does."""
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        total += len(item) if isinstance(item, (str, bytes)) else _ELEMENT_COST
        if isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        if total + len(stack) > MAX_CHARS:
            raise _LimitError(f"a value of more than {MAX_CHARS} characters")
    return total


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return _ELEMENT_SIZE * len(value) if isinstance(value, (list, tuple)) else 0


class _Limits(Extension):
    """Compiles the checks into the template, and knows the tag `generation` (its body is rendered as it is)."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)

    def guard(self, template: nodes.Template) -> None:
        for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
                # The fixed text of a body never passes through a filter or an operator, so its price is put here.
                size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
                tick = self.call_method("tick", [nodes.Const(size)], lineno=node.lineno)
                node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        self._replace_expressions(template)

    def _replace_expressions(self, node: nodes.Node) -> None:
        for child in node.iter_child_nodes():
            self._replace_expressions(child)
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, self._guarded(value))
            elif isinstance(value, list):
                value[:] = [self._guarded(item) if isinstance(item, nodes.Node) else item for item in value]

    def _guarded(self, node: nodes.Node) -> nodes.Node:
        if isinstance(node, nodes.Concat):
            return self.call_method("concat", node.nodes, lineno=node.lineno)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and node.ctx == "load":
            none = nodes.Const(None)
            bounds: list[nodes.Expr] = [bound or none for bound in (node.arg.start, node.arg.stop, node.arg.step)]
            return self.call_method("cut", [node.node, *bounds], lineno=node.lineno)
        return node

    def tick(self, size: int) -> str:
        meter = _METER.get()
        meter.step()
        meter.write(size)
        return ""

    def concat(self, *values: Any) -> str:
        meter = _METER.get()
        texts = [meter.text(value) for value in values]
        meter.pay(sum(map(len, texts)))
        return "".join(texts)

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        _METER.get().pay(_size(value))
        return value[start:stop:step]


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox. Holds nothing of a rendering; compiled templates are shared by threads."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Limits, loopcontrols], finalize=_finalize)
        self.filters["tojson"] = _to_json
        self.filters.update({name: _metered(function, name) for name, function in self.filters.items()})
        self.tests.update({name: _metered(function, None) for name, function in self.tests.items()})
        self.globals.pop("lipsum", None)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_Namespace
        )

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for extension in self.iter_extensions():
            if isinstance(extension, _Limits):
                extension.guard(source)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _METER.get().step()
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_INT_BITS:
                raise _LimitError("a power of more than 4096 bits")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "+":
            _METER.get().pay(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _METER.get().step()
        # Jinja wraps str.format; the method itself is underneath.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, (str, bytes)):
            _check_method(owner, function.__name__, args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        _METER.get().pay(_size(result))
        return result


# With the context as first argument Jinja can't apply this to constants while compiling, when there is no meter.
@jinja2.pass_context
def _finalize(context: jinja2.runtime.Context, value: Any) -> str:
    meter = _METER.get()
    text = meter.text(value)
    meter.write(len(text))
    return text


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise _LimitError(f"a product of more than {_MAX_INT_BITS} bits")
    elif isinstance(left, int):
        _METER.get().pay(max(left, 0) * _size(right))
    elif isinstance(right, int):
        _METER.get().pay(max(right, 0) * _size(left))


def _check_format(pattern: str, values: Any) -> None:
    # Widths and precisions: neither five digits in the pattern, nor one taken from the values.
    if re.search(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{", pattern):
        raise _LimitError("a format with a huge or computed width")
    num_fields = pattern.count("%") + pattern.count("{")
    _METER.get().pay(len(pattern) + (num_fields * (MAX_WIDTH + _cost(values)) if num_fields else 0))


def _check_widths(values: list[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value > MAX_WIDTH:
            raise _LimitError(f"a width of {value}, the limit is {MAX_WIDTH}")


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _METER.get().pay(len(text) + text.count(old) * len(new))


def _check_join(separator: Any, items: Any) -> None:
    if isinstance(items, (list, tuple, str)):
        _METER.get().pay(len(items) * len(str(separator)) + _cost(items))


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a method of a string is called from a template."""
    values = [*args, *kwargs.values()]
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        _check_widths(values)
        if name == "expandtabs":
            num_tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")
            _METER.get().pay(len(owner) + num_tabs * max([8, *(v for v in values if isinstance(v, int))]))
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    elif name == "join" and len(args) == 1:
        _check_join(owner, args[0])
    elif name in ("format", "format_map"):
        _check_format(str(owner), values)
    elif name == "translate":
        raise _LimitError("str.translate")


def _checked_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Before a filter is applied to `args[0]`; returns the arguments to apply it with."""
    meter = _METER.get()
    value, values = args[0], [*args[1:], *kwargs.values()]
    if name in ("center", "indent", "wordwrap", "batch", "slice", "truncate", "round"):
        _check_widths(values)
        widest = max([1, *(v if isinstance(v, int) else _size(v) for v in values)])
        if name == "indent":
            meter.pay(_size(value) + (str(value).count("\n") + 1) * widest)
        elif name == "wordwrap":
            meter.pay(_size(value) * (1 + max([1, *(len(v) for v in values if isinstance(v, str))])))
    elif name == "format":
        _check_format(str(value), values)
    elif name == "replace" and len(args) >= 3:
        _check_replace(value, args[1], args[2])
    elif name == "join":
        items = list(value)
        _check_join(args[1] if len(args) > 1 else kwargs.get("d", ""), items)
        return (items, *args[1:])
    elif name == "sum" and any(isinstance(item, (list, tuple)) for item in values):
        raise _LimitError("a sum of lists")
    elif name in ("escape", "e", "forceescape", "urlize", "xmlattr", "pprint", "string", "striptags"):
        meter.pay(_cost(value) * (1 if name == "string" else 6))
    return args


def _metered(function: Any, filter_name: str | None) -> Callable[..., Any]:
    """A filter (or a test, which has no name here) with its price put on it.

    While a template is compiled there is no meter; Jinja takes the error for "not a constant" and asks again later.
    """
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context Jinja itself passes first

    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.step()
        if filter_name is not None and len(args) > num_passed:
            args = (*args[:num_passed], *_checked_arguments(filter_name, args[num_passed:], kwargs))
        result = function(*args, **kwargs)
        meter.pay(_size(result))
        return result

    return update_wrapper(metered, function)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    if isinstance(indent, int) and indent > 100:
        raise _LimitError(f"an indent of {indent}")
    _METER.get().pay(_cost(value) * (1 if indent is None else 8))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 1000 or re.search(r"\d{3}", pattern):
        raise _LimitError("a date format with a huge width")
    return _METER.get().now.strftime(pattern)


class _Namespace(Namespace):
    """`namespace(...)` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` may be a name, as in Jinja's own
        values = dict(*args[1:], **kwargs)
        for name in values:
            _Namespace._check(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace attribute named {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message)[:1000])


class ChatTemplate:
    """A compiled template. Immutable; may be used from several threads.

    Raises `TemplateError` if the source isn't valid Jinja or has more than 4 Mi characters.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}; pass another one"
            )
        self.source = source
        self._template = _compile(source)

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """The text for these variables; `strftime_now` sees `now`.

        Raises `TemplateRefusal` when the template refuses or fails, `TemplateError` when it exceeds a limit (10
        seconds, 64 Mi characters of output, see the module's docstring).
        """
        token = _METER.set(_Meter(now))
        try:
            return self._template.render(variables)
        except _LimitError as error:
            raise TemplateError(f"the chat template was stopped: {_line(error)}; use one that needs less") from None
        except (RecursionError, MemoryError) as error:
            raise TemplateError(f"the chat template was stopped: {type(error).__name__}; use another one") from None
        except Exception as error:  # whatever the template's own expressions raise
            raise TemplateRefusal(f"the chat template refuses this conversation: {_line(error)}; change it") from error
        finally:
            _METER.reset(token)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    try:
        return _Environment().from_string(source)
    except (jinja2.exceptions.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
        raise TemplateError(f"the chat template is not valid Jinja: {_line(error)}; pass another one") from error


def _line(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__
