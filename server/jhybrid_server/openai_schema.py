"""OpenAI's request bodies, with the extensions that LLM servers share, and the engine's requests that they mean.

Unknown fields are refused by name, and so are known ones that this server has no answer to: nothing is ignored.
What a value may be beyond its type is the engine's to say.
"""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from jhybrid.errors import RequestError
from jhybrid.request import MAX_LOGIT_BIAS, SCALARS, Request, SamplingParams
from jhybrid.tokenizer import Tokenizer
from jhybrid_server.dialect import Dialect
from jhybrid_server.openai_formats import MOVED, RENAMES, ResponseFormat, StructuredOutputsBody, structured_outputs
from jhybrid_server.openai_tools import CallBody, NamedTool, ToolBody, tools_of
from jhybrid_server.talk import Choice, Talk

MAX_PROMPTS = 1024
TOKEN_ID = re.compile(r"-?\d{1,19}")

SHARED = (*SCALARS, "stop", "stop_token_ids")
"""Fields that both kinds of generation have, under the names of SamplingParams."""


def _refused(reason: str, *harmless: object) -> Callable[[Any], Any]:
    """Refuses a field unless its value asks for nothing."""

    def check(value: Any) -> Any:
        if value is None or any(value == known and type(value) is type(known) for known in harmless):
            return value
        raise ValueError(f"is not supported: {reason}")

    return check


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> list[str | list[Any]]:
    """One or several prompts, each a text or token ids. What is in the ids is the engine's to check."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a text, a list of token ids, or a list of either")
    if not value:
        raise ValueError("is empty; give at least one prompt")
    kind = str if isinstance(value[0], str) else list if isinstance(value[0], list) else None
    if kind is None:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts, at most {MAX_PROMPTS} allowed; send several requests")
    for at, prompt in enumerate(value):
        if not isinstance(prompt, kind):
            raise ValueError(f"entry {at} is no {'text' if kind is str else 'list of token ids'} as the first one is")
    return value


def _as_text(content: Any) -> Any:
    """The text of a message: a string, or a list of text parts, which are put on lines of their own."""
    if not isinstance(content, list):
        return content
    for at, part in enumerate(content):
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            raise ValueError(f"part {at} is not {{'type': 'text', 'text': ...}}; only texts are understood")
        if not isinstance(part["text"], str):
            raise ValueError(f"text of part {at} must be a string")
    return "\n".join(part["text"] for part in content)


Stop = Annotated[list[str] | None, BeforeValidator(_as_list)]
Prompts = Annotated[list[Any], BeforeValidator(_as_prompts)]
Content = Annotated[str, BeforeValidator(_as_text)]
NoSuffix = Annotated[Any, AfterValidator(_refused("text can only be continued, not filled in", ""))]
NoFunctions = Annotated[Any, AfterValidator(_refused("give tools and tool_choice"))]
NoStore = Annotated[Any, AfterValidator(_refused("nothing is kept", False))]


class Body(BaseModel):
    """Strict: `"1"` is no number, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(Body):
    """What completions and chats share. None means that a field was left out."""

    model: str = ""
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    snapshot_at: list[int] | None = None
    user: str | None = None
    """Who asks; it changes nothing."""

    @property
    def wants_stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def renames(self) -> dict[str, str]:
        """What fields of the engine's are called here."""
        return {"prompt_token_ids": "prompt"} | (RENAMES if self.structured_outputs is None else {})

    def check(self) -> None:
        """What fields mean together. RequestError."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "is for streams; set stream=true or leave it out")

    def _sampling(self, **own: Any) -> SamplingParams:
        given = {name: value for name in SHARED if (value := getattr(self, name)) is not None}
        bias: dict[int, float] = {}
        if self.logit_bias is not None and len(self.logit_bias) > MAX_LOGIT_BIAS:  # before time is spent on them
            count = len(self.logit_bias)
            raise RequestError("logit_bias", f"{count} entries given, at most {MAX_LOGIT_BIAS} allowed")
        for key, value in (self.logit_bias or {}).items():
            if not TOKEN_ID.fullmatch(key):
                raise RequestError("logit_bias", f"key {key[:40]!r} is no token id")
            bias[int(key)] = value
        wanted = structured_outputs(self.response_format, self.structured_outputs)
        return SamplingParams(**given, **own, logit_bias=bias, structured_outputs=wanted)

    def _hints(self) -> dict[str, Any]:
        return {
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt,
            "snapshot_at": self.snapshot_at or [],
        }


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: NoSuffix = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise RequestError("best_of", f"{self.best_of} differs from n; only best_of equal to n is supported")

    def requests(self, name: str) -> list[Request]:
        """One for each prompt."""
        own: dict[str, Any] = {"logprobs": self.logprobs}
        if self.max_tokens is not None:
            own["max_tokens"] = self.max_tokens
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            own["prompt_logprobs"] = self.logprobs
        sampling = self._sampling(**own)
        many = len(self.prompt) > 1
        return [
            Request(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=None if isinstance(prompt, str) else prompt,
                sampling=sampling,
                request_id=f"{name}-{i}" if many else name,
                add_special_tokens=self.add_special_tokens is not False,
                **self._hints(),
            )
            for i, prompt in enumerate(self.prompt)
        ]


class Message(Body):
    role: str
    content: Content | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self, field: str) -> dict[str, Any]:
        """As chat templates read it. RequestError for fields that the role has not."""
        calls = [call.for_template(f"{field}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls or ())]
        owners = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
        for name, role in owners.items():
            if getattr(self, name) is not None and self.role != role:
                raise RequestError(f"{field}.{name}", f"is not for the role {self.role[:40]!r}; remove it")
        if self.content is None and not calls:
            raise RequestError(f"{field}.content", "must be a text")
        said = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        return {"content": ""} | said | ({"tool_calls": calls} if calls else {})


def rendering(body: "Conversation | TokenizeBody") -> dict[str, Any]:
    """What the chat template is given. RequestError."""
    variables = body.chat_template_kwargs or {}
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered] if isinstance(body, Conversation) else []
    taken = {"messages", "tools", "add_generation_prompt"} & set(variables)
    if taken:
        raise RequestError("chat_template_kwargs", f"{', '.join(sorted(taken))}: not here, it is no variable")
    return {
        "messages": [said.for_template(f"messages[{i}]") for i, said in enumerate(body.messages or ())],
        **({"tools": tools} if tools else {}),
        "add_generation_prompt": body.add_generation_prompt is not False,
        **variables,
    }


class Conversation(Body):
    """What was said, and what may be said and called next. gRPC's chats become one too."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered(self) -> list[ToolBody]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def grammar_names(self) -> dict[str, str]:
        """What the grammar of calls that are required is made of."""
        if self.tool_choice in (None, "none", "auto"):
            return {}
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        asked = [i for i, tool in enumerate(self.offered) if name in (None, tool.function.name)]
        return {"structured_outputs.grammar": f"tools[{asked[0]}].function.parameters" if len(asked) == 1 else "tools"}

    def talk(self, dialect: Dialect, tokenizer: Tokenizer, prompt: str) -> Talk:
        """What the answers may hold. RequestError for tools that the model cannot call."""
        if self.tool_choice not in (None, "none") and not self.tools:
            raise RequestError("tool_choice", "needs tools; give some, or leave it out")
        tools = tools_of(self.offered, dialect.tool_format()) if self.offered else []
        several = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedTool):
            choice = Choice("required", self.tool_choice.function.name, several=False)
        else:
            choice = Choice(self.tool_choice or "auto", several=several)
        return Talk(dialect, tokenizer, dialect.reasoning(prompt), tools, choice)


class ChatBody(Conversation, GenerationBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: NoFunctions = None
    function_call: NoFunctions = None
    store: NoStore = None

    @property
    def renames(self) -> dict[str, str]:
        names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return super().renames | names | self.grammar_names

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_completion_tokens", "differs from max_tokens; give one of them")

    def request(self, name: str, prompt: str, talk: Talk) -> Request:
        """`prompt` is what the chat template made; it has its special tokens already."""
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = talk.bind(self._sampling(max_tokens=limit, logprobs=logprobs))
        return Request(prompt=prompt, sampling=sampling, request_id=name, add_special_tokens=False, **self._hints())


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation as its model would read it."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """RequestError unless exactly one kind of text is there."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "give exactly one of prompt and messages")


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str = ""
    tokens: list[int]
    skip_special_tokens: bool | None = None


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """A body of JSON. Raises RequestError naming the first field at fault."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
    beside = [fault for fault in others if fault["loc"][:1] == first["loc"][:1]]  # what else the field could have been
    given = json.loads(raw) if first["loc"] else None
    fault = max([first, *beside], key=lambda fault: len(_path(fault, given)))
    path = _path(fault, given)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    field = field[:200] or "body"
    if fault["type"] == "extra_forbidden":
        remedy = f"use {MOVED[field]}" if field in MOVED else "remove it"
        raise RequestError(field, f"is not a field that this server knows; {remedy}")
    if fault["type"] == "json_invalid" and "recursion limit" in fault["msg"]:
        raise RequestError(field, "is nested more than 200 levels deep; flatten it")
    raise RequestError(field, fault["msg"].removeprefix("Value error, "))


def _has(given: Any, part: str | int) -> bool:
    return part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)


def _path(fault: ErrorDetails, given: Any) -> list[str | int]:
    """Where in the body a fault is, without pydantic's names of the kinds that it tried there."""
    path: list[str | int] = []
    for at, part in enumerate(fault["loc"]):
        is_there = _has(given, part)
        if is_there:
            given = given[part]
        if is_there or (fault["type"] == "missing" and at == len(fault["loc"]) - 1):
            path.append(part)
    return path
