"""Sandbox: the Jinja environment that chat templates run in, which come with checkpoints and are not trusted.

Jinja's own sandbox keeps a template from Python's internals. What a template may cost is kept here: each rendering
has a budget of steps (of about 100 ns; characters made or searched count, too), and no value grows beyond a bound.
Loops and macros are charged for their bodies; whatever makes a value or walks through one is checked before it runs,
since a single operation can otherwise take hours or all memory. What no chat template uses is left out.
"""

import json
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, KeysView, MappingView, Sized, ValuesView
from datetime import datetime
from functools import update_wrapper
from itertools import chain, islice
from types import BuiltinFunctionType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace, pass_eval_context

from jhybrid.template_charges import CHARS_PER_STEP, Charging

MAX_SOURCE_CHARS = 256 * 2**10
MAX_STEPS = 20_000_000  # of one rendering; a second or two
MAX_VALUE_CHARS = 16 * 2**20
MAX_ELEMENTS = 2**20
MAX_RANGE = 100_000
MAX_DEPTH = 200
MAX_BITS = 10_000  # of an integer; Python writes no more than 14,000


class _Budget(threading.local):
    """What the rendering that runs in this thread may still do."""

    left: list[int]  # one number, in a list since that is found faster


_budget = _Budget()


class BoundError(SecurityError):
    """A template that does or makes too much."""


def compiled(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """The template of `source`; `fill_budget` before each rendering. Raises what Jinja and Python raise."""
    if len(source) > MAX_SOURCE_CHARS:
        raise BoundError(f"it has {len(source)} characters, at most {MAX_SOURCE_CHARS} are read")
    tree = Charging().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.template_class.from_code(environment, environment.compile(tree), environment.make_globals(None))


# Charges and checks


def fill_budget() -> None:
    """For the next rendering in this thread."""
    _budget.left = [MAX_STEPS]


def _spend(steps: int) -> None:
    left = _budget.left
    left[0] -= steps
    if left[0] < 0:
        raise BoundError(f"it takes more than {MAX_STEPS} steps")


def _fits(chars: int) -> None:
    if chars > MAX_VALUE_CHARS:
        raise BoundError(f"it makes a value of {chars} characters, at most {MAX_VALUE_CHARS} are allowed")


def _make(chars: int) -> None:
    """Charge a text before it is made, or at once after."""
    if chars >= CHARS_PER_STEP:  # shorter ones are charged as what the template has to make them
        if chars > MAX_VALUE_CHARS:
            _fits(chars)
        left = _budget.left
        left[0] -= chars // CHARS_PER_STEP
        if left[0] < 0:
            _spend(0)


def _list(elements: int) -> None:
    if elements > MAX_ELEMENTS:
        raise BoundError(f"it makes a list of {elements} elements, at most {MAX_ELEMENTS} are allowed")
    _spend(elements)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _made(value: Any) -> Any:
    """`value`, charged. An iterator is run to its end, so that none chains on others."""
    if isinstance(value, str):
        _make(len(value))
    elif isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise BoundError(f"it makes an integer of {value.bit_length()} bits, at most {MAX_BITS} are allowed")
    elif isinstance(value, list | tuple):
        _list(len(value))
    elif hasattr(type(value), "__next__"):
        return iter(_solid(value))
    return value


def _solid(value: Any) -> Any:
    """An iterator's elements as a list, other values as they are."""
    if not hasattr(type(value), "__next__"):
        return value
    elements = list(islice(value, MAX_ELEMENTS + 1))
    _list(len(elements))
    return elements


_PLAIN = (int, float, bool, type(None))


def _walk(value: Any) -> int:
    """Characters of `value` written out, about, charged as steps: who writes, compares or hashes it does no more.

    Values can share parts, so that a few operations make one that is larger than all memory once written.
    """
    chars, level = 0, [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for part in level:
            kind = type(part)
            if kind is str or isinstance(part, str):
                chars += len(part)
            elif kind in _PLAIN:
                chars += 8
            elif isinstance(part, dict | list | tuple | KeysView | ItemsView | ValuesView):
                chars += 4 + 4 * len(part)
                _spend(1 + 5 * len(part))
                below.extend(part)
                below.extend(part.values() if isinstance(part, dict) else ())
            else:
                chars += 32
        if not below:
            _spend(chars // CHARS_PER_STEP)
            return chars
        level = below
    raise BoundError(f"it takes a value that is nested more than {MAX_DEPTH} deep")


def _walked(value: Any) -> Any:
    """`value`, ready to be compared or hashed."""
    if type(value) not in _PLAIN:
        _walk(value)
    return value


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    _fits(_walk(value))
    return str(value)


# Operations that take the place of Jinja's


def _concat(values: list[Any]) -> str:
    texts = [value if type(value) is str else _written(value) for value in values]
    _make(sum(map(len, texts)))
    return "".join(texts)


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return _made(value[start:stop:step])


def _contains(left: Any, right: Any) -> bool:
    right = _solid(right)
    if isinstance(right, dict):
        _walked(left)
    elif isinstance(left, str) or type(left) in _PLAIN:
        length = len(left) if isinstance(left, str) else 0
        elements = _length(right)
        _spend(
            (elements + length) // CHARS_PER_STEP
            if isinstance(right, str)
            else elements * (1 + length // CHARS_PER_STEP)
        )
    else:
        _walk(left)
        _walk(right)
    return left in right


@pass_eval_context  # which also keeps Jinja from working out constants while it compiles
def _finalize(_: nodes.EvalContext, value: Any) -> str:
    text = value if type(value) is str else _written(value)
    _make(len(text))
    return text


def _check_replace(text: Any, old: Any, new: Any, count: Any = None, *_: Any, **__: Any) -> None:
    text, old, new = _written(text), _written(old), _written(new)
    _make(len(text) + max(0, len(new) - len(old)) * text.count(old))


def _check_join(values: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    _make(_walk(values) + len(_written(separator)) * _length(values))


def _check_strip(text: Any, chars: Any = None) -> None:
    _spend(_walk(text) * (1 if chars is None else _walk(chars)) // 256)  # Python searches backwards in that time


_PRINTF = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\d+|\*)?(?:\.(\d+|\*)?)?")


def _widths(runs: Iterable[str]) -> int:
    widths = [run for run in runs if run]
    if any(len(run) > 8 or run == "*" for run in widths):
        raise BoundError("it formats to a width that is too large, or given as `*`")
    return sum(map(int, widths))


def _check_printf(text: str, values: Any) -> None:
    if re.search(r"%\([^()]*\(", text):
        raise BoundError("it formats with parentheses in a key")
    uses = text.count("%") if isinstance(values, dict) else 1
    _make(len(text) + _widths(chain.from_iterable(_PRINTF.findall(text))) + uses * _walk(values))


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """`str.format`, each field of which is charged."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _spend(1)
        _make(_widths(re.findall(r"\d+", format_spec)) + _walk(value))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        _fits(_walk(value))
        return super().convert_field(value, conversion)


def _call_of_text(text: str, method: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    _spend(len(text) // CHARS_PER_STEP)
    if name in ("center", "ljust", "rjust", "zfill"):
        _fits(args[0] if args and isinstance(args[0], int) else 0)
    elif name == "replace":
        _check_replace(text, *args, **kwargs)
    elif name == "join":
        args = tuple(_solid(value) for value in args)
        _check_join(*args, text)
    elif name in ("split", "rsplit"):
        return _split(text, method, name == "rsplit", *args, **kwargs)
    elif name == "splitlines":
        _list(sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")))
    elif name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"):
        _check_strip(text, *args[:1])
    else:
        _walk(args)
    return method(*args, **kwargs)


def _split(text: str, method: Callable[..., Any], backwards: bool, sep: Any = None, maxsplit: Any = -1) -> Any:
    if backwards and sep is not None:
        _check_strip(text, sep)
    unbounded = isinstance(maxsplit, int) and not 0 <= maxsplit <= MAX_ELEMENTS
    return method(sep, MAX_ELEMENTS if unbounded else maxsplit)


# Functions and filters


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which reach into Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"name {name!r} begins with an underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # Jinja's writes out the values, which may hold the namespace itself


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(_written(message))


def _strftime_now(form: str) -> str:
    if len(form) > 200:
        raise BoundError(f"it asks strftime_now for a format of {len(form)} characters")
    return datetime.now().strftime(form)


def _range(*args: int) -> range:
    given = range(*args)
    if len(given) > MAX_RANGE:
        raise BoundError(f"it makes a range of {len(given)}, at most {MAX_RANGE} are allowed")
    return given


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which prompts must not."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > 16 or _walk(separators) > 64:
        raise BoundError("it writes JSON with an indent or separators beyond 16 characters")
    _fits(_walk(value))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes positional arguments or keywords, not both")
    text, values = _written(text), kwargs or args
    _check_printf(text, values)
    return text % values


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = _written(text)
    lines = 2 + sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
    _make(len(text) + lines * (len(width) if isinstance(width, str) else max(0, width)))


def _check_round(_: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
    if not -20 <= precision <= 20:
        raise BoundError(f"it rounds to {precision} digits, within 20 are allowed")


def _check_elements(values: Any, *_: Any, **__: Any) -> None:
    _list(_length(values))


def _check_all(*args: Any, **kwargs: Any) -> None:
    for value in chain(args, kwargs.values()):
        _fits(_walk(value))


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter or test behind a check of its arguments, with what it makes charged."""
    given_first = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own context or environment

    def checked(*args: Any, **kwargs: Any) -> Any:
        own, given = args[:given_first], [_solid(value) for value in args[given_first:]]
        _spend(10)
        check(*given, **kwargs)
        return _made(function(*own, *given, **kwargs))

    return update_wrapper(checked, function)


_ANY = ("abs", "attr", "count", "d", "default", "first", "last", "length")  # as they are: they make and walk nothing
_CHECKS: dict[str, Callable[..., None]] = {
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_round,
    "trim": _check_strip,
    **dict.fromkeys(
        ("items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"), _check_elements
    ),
    **dict.fromkeys(
        ("capitalize", "e", "escape", "float", "int", "lower", "safe", "string", "title", "upper"), _check_all
    ),
    **dict.fromkeys(("dictsort", "max", "min", "sort", "unique"), _check_all),
}
_OWN_FILTERS = {
    "tojson": _checked(_to_json, lambda *_, **__: None),
    "format": _checked(_format, lambda *_, **__: None),
    "charge": _spend,
    "comparable": _walked,
    "concat": _concat,
    "contains": _contains,
    "slice": _slice,
}
_COMPARING = (
    *("lower", "upper", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge"),
    *("<", "lt", "lessthan", "<=", "le"),
)
_TEXT = frozenset(
    (
        *("capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map", "index", "isalnum"),
        *("isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
        *("isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
        *("removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split"),
        *("splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"),
    )
)
_METHODS = ((str, _TEXT), (dict, frozenset(("copy", "get", "items", "keys", "values"))))
_SEQUENCE = frozenset(("copy", "count", "index"))


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The functions and options that templates of the Hugging Face hub are written against."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=_finalize,
            optimized=False,  # nothing is worked out before there is a budget
        )
        own = {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "range": _range}
        self.globals = {
            **{name: self.globals[name] for name in ("dict", "cycler", "joiner")},
            **own,
            "namespace": _Namespace,
        }
        checked = {name: _checked(self.filters[name], check) for name, check in _CHECKS.items()}
        self.filters = {**{name: self.filters[name] for name in _ANY}, **checked, **_OWN_FILTERS}
        comparing = {name: _checked(self.tests[name], _check_all) for name in _COMPARING}
        self.tests = {**self.tests, **comparing, "in": _contains}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, int | float | bytes):
            return False
        if isinstance(obj, list | tuple):
            return attr in _SEQUENCE
        for kind, methods in _METHODS:
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, by_mapping = str(value.__self__), value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(text, () if by_mapping else args, args[0] if by_mapping else kwargs)

        return formatted

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is not str and type(argument) is not int:
            _walked(argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend(20 + len(args))  # about what a call takes
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | dict | list | tuple):
            for own in ("_loop_vars", "_block_vars"):  # which Jinja adds, for functions that ask for its context
                kwargs.pop(own, None)
        if isinstance(owner, str):
            return _made(_call_of_text(owner, __obj, __obj.__name__, args, kwargs))
        if isinstance(owner, dict | list | tuple):
            _walk(args)
            _spend(len(owner)) if isinstance(owner, dict) else _walk(owner)
            return __obj(*args, **kwargs)
        if isinstance(__obj, BuiltinFunctionType) or not __self.is_safe_callable(__obj):
            raise SecurityError(f"it calls a {type(__obj).__name__}, which templates may not")
        if isinstance(__obj, type) or isinstance(owner, LoopContext):
            args = tuple(_solid(value) for value in args)
            _walk(args)
        return _made(__context.call(__obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                _make(len(left) + len(right))
                return left + right
            if isinstance(left, list | tuple) and isinstance(right, list | tuple):
                _list(len(left) + len(right))
                return self.binop_table["+"](left, right)
        elif operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(some, str | list | tuple) and isinstance(times, int):
                    (_make if isinstance(some, str) else _list)(len(some) * max(0, times))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise BoundError(f"it makes an integer of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _check_printf(left, right)
        elif operator == "-" and isinstance(left, MappingView):
            raise BoundError("it subtracts from the keys of an object")
        return _made(self.binop_table[operator](left, right))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own form

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
