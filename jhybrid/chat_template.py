"""ChatTemplate: a conversation as the prompt text that its model was trained on.

Templates come with checkpoints and are not trusted: they run in Jinja's sandbox, with a bound on
ranges (Jinja's own) and on the output.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from jhybrid.errors import ConfigError, RequestError
from jhybrid.tokenizer import Tokenizer

MAX_OUTPUT_CHARS = 16 * 2**20
MAX_MESSAGES = 10_000


class ChatTemplate:
    """The chat templates of one tokenizer, compiled once. Rendering is safe from any thread."""

    def __init__(self, templates: dict[str, str], named_tokens: dict[str, str]):
        """`templates` by name (`default`, perhaps `tool_use`), `named_tokens` such as `bos_token`.

        Raises ConfigError if a template is no valid Jinja.
        """
        self._named_tokens = named_tokens
        environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    "chat_template", f"template {name!r} is no valid Jinja: line {error.lineno}: {error.message}"
                ) from error

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        """The templates that came with a tokenizer."""
        return cls(tokenizer.chat_templates, tokenizer.named_tokens)

    def render(
        self,
        /,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Prompt text of `messages`; encode it with `add_special_tokens=False`, as the template writes BOS itself.

        `variables` reach the template as they are (`enable_thinking`, `documents`). Raises RequestError naming the
        field for messages that are malformed or that the template refuses.
        """
        _check(messages, tools)
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise RequestError("messages", "this model has no chat template; send a plain prompt")
        values = {
            **self._named_tokens,
            **variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _bounded(self._compiled[name].generate(values))
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError("messages", f"the chat template refused them: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise RequestError("messages", f"the chat template failed ({cause}); check roles and content") from error


def _bounded(pieces: Iterable[str]) -> str:
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_OUTPUT_CHARS:
            raise RequestError("messages", f"the prompt grows beyond {MAX_OUTPUT_CHARS} characters; shorten it")
        kept.append(piece)
    return "".join(kept)


def _check(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> None:
    if not messages:
        raise RequestError("messages", "is empty; give at least one message")
    if len(messages) > MAX_MESSAGES:
        raise RequestError("messages", f"{len(messages)} given, at most {MAX_MESSAGES} allowed")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{i}]", f"must be an object, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}].role", f"must be a string, got {message.get('role')!r}")
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise RequestError(f"tools[{i}]", f"must be an object, got {type(tool).__name__}")


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which reach into Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"name {name!r} begins with an underscore")
        super().__setitem__(name, value)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own form

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The functions and options that templates of the Hugging Face hub are written against."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    environment.globals.update(functions)
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML, which prompts must not
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
