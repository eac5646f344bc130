"""ChatTemplate: a conversation as the prompt text that its model was trained on.

Templates come with checkpoints and are not trusted: they run in a sandbox, with bounds on what they do and make.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from jhybrid.errors import ConfigError, RequestError
from jhybrid.template_sandbox import Sandbox, compiled, fill_budget
from jhybrid.tokenizer import Tokenizer, well_formed

MAX_OUTPUT_CHARS = 16 * 2**20
MAX_MESSAGES = 10_000
MAX_ERROR_CHARS = 1000


class ChatTemplate:
    """The chat templates of one tokenizer, compiled once. Rendering is safe from any thread."""

    def __init__(self, templates: dict[str, str], named_tokens: dict[str, str]):
        """`templates` by name (`default`, perhaps `tool_use`), `named_tokens` such as `bos_token`.

        Raises ConfigError if a template does not compile.
        """
        self._named_tokens = named_tokens
        environment = Sandbox()
        self._compiled: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._compiled[name] = compiled(environment, source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    "chat_template", f"template {name!r} is no valid Jinja: line {error.lineno}: {_brief(error)}"
                ) from error
            except Exception as error:  # Python's compiler, too, refuses what nests too deep
                raise ConfigError("chat_template", f"template {name!r} does not compile: {_brief(error)}") from error

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
        field: messages that are malformed or that the template refuses, or a template that does what it may not.
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
        fill_budget()
        try:
            return well_formed(_bounded(self._compiled[name].generate(values)))
        except RequestError:
            raise
        except (SecurityError, RecursionError, MemoryError) as error:
            message = f"the model's template {name!r} was stopped: {_brief(error)}; use another, or send less"
            raise RequestError("chat_template", message) from error
        except jinja2.TemplateError as error:
            raise RequestError("messages", f"the chat template refused them: {_brief(error)}") from error
        except Exception as error:  # a template is code, which can fail in any way
            message = f"the chat template failed ({_brief(error)}); check roles and content"
            raise RequestError("messages", message) from error


def _brief(error: Exception) -> str:
    """What an error says, of which a template may have made any amount."""
    text = f"{error}" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return well_formed(text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "...")


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
