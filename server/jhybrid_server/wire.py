"""Wire: requests, deltas and their companions as protobuf messages and back. Server and clients both use it."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jhybrid.errors import RequestError
from jhybrid.request import MAX_LOGIT_BIAS, SCALARS, Delta, Request, SamplingParams, TokenLogprobs
from jhybrid.structured_outputs import StructuredOutputs
from jhybrid_server.scoring import ContinuationScore, Question
from jhybrid_server.talk import ChatDelta, Choice
from jhybrid_server.tool_formats import Tool, ToolCall
from jhybrid_server.usage import Timing, Usage
from jhybrid_server.v1 import inference_pb2 as pb

PLAIN_SAMPLING = (*SCALARS, "logprobs")
"""Fields of SamplingParams that are one optional scalar on the wire, under the same name."""

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}
"""Ends of an answer that are messages; the others (abort, error) are the call's status."""


MODES = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "none": pb.ToolChoice.MODE_NONE,
    "required": pb.ToolChoice.MODE_REQUIRED,
}
"""Kinds of talk.Choice."""


def request_to_wire(request: Request, model: str = "") -> pb.GenerateRequest:
    """Raises RequestError for what the wire cannot carry: a wrong type, a number beyond 64 bits."""
    message = pb.GenerateRequest(request_id=request.request_id or "", model=model)
    with _naming("priority"):
        message.priority = request.priority
    with _naming("add_special_tokens"):
        message.add_special_tokens = request.add_special_tokens
    if request.cache_salt is not None:
        with _naming("cache_salt"):
            message.cache_salt = request.cache_salt
    with _naming("snapshot_at"):
        message.snapshot_at.extend(request.snapshot_at)
    if request.prompt is not None:
        with _naming("prompt"):
            message.text = request.prompt
    if request.prompt_token_ids is not None:
        with _naming("prompt_token_ids"):
            message.token_ids.ids.extend(request.prompt_token_ids)
            message.token_ids.SetInParent()  # an empty list is not the same as none
    _sampling_to_wire(request.sampling, message.sampling)
    return message


def _sampling_to_wire(sampling: SamplingParams, message: pb.SamplingParams) -> None:
    message.SetInParent()
    with _naming("max_tokens"):
        if sampling.max_tokens is None:
            message.fill_context = True
        else:
            message.max_tokens = sampling.max_tokens
    for name in PLAIN_SAMPLING:
        value = getattr(sampling, name)
        if value is not None:
            with _naming(name):
                setattr(message, name, value)
    with _naming("stop"):
        message.stop.extend(sampling.stop_strings)
    with _naming("stop_token_ids"):
        message.stop_token_ids.extend(sampling.stop_token_ids)
    with _naming("logit_bias"):
        for token, bias in sampling.logit_bias.items():
            message.logit_bias[token] = bias
    if sampling.structured_outputs is not None:
        with _naming("structured_outputs"):
            _structured_to_wire(sampling.structured_outputs, message.structured_outputs)


def _structured_to_wire(wanted: StructuredOutputs, message: pb.StructuredOutputs) -> None:
    kind = wanted.kind
    if wanted.reasoning is not None:
        raise RequestError("structured_outputs.reasoning", "is the server's to set; leave it out")
    if kind == "choice":
        message.choice.texts.extend(wanted.choice or ())
        message.choice.SetInParent()
    elif kind == "json":
        message.json = wanted.json if isinstance(wanted.json, str) else wanted.schema_text()
    else:
        setattr(message, kind, getattr(wanted, kind))


def _structured_from_wire(message: pb.StructuredOutputs) -> StructuredOutputs:
    kind = message.WhichOneof("kind")
    if kind is None:
        return StructuredOutputs()  # which the engine refuses
    given: dict[str, Any] = {kind: list(message.choice.texts) if kind == "choice" else getattr(message, kind)}
    return StructuredOutputs(**given)


def request_from_wire(message: pb.GenerateRequest) -> Request:
    """Raises RequestError if the message has no prompt; the rest is the engine's to check."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise RequestError("prompt", "is missing; set text or token_ids")
    return Request(
        prompt=message.text if kind == "text" else None,
        prompt_token_ids=list(message.token_ids.ids) if kind == "token_ids" else None,
        sampling=_sampling_from_wire(message.sampling),
        request_id=message.request_id or None,
        priority=message.priority,
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        snapshot_at=list(message.snapshot_at),
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
    )


def chat_request_from_wire(message: pb.ChatRequest, prompt: str) -> Request:
    """`prompt` is what the chat template made; it has its special tokens already."""
    if message.options.WhichOneof("prompt") is not None:
        raise RequestError("options.prompt", "must be unset: the messages are the prompt")
    options = pb.GenerateRequest()
    options.CopyFrom(message.options)
    options.text, options.add_special_tokens = prompt, False
    return request_from_wire(options)


def chat_to_wire(
    messages: Iterable[Mapping[str, Any]],
    sampling: SamplingParams,
    model: str,
    chat_template_kwargs: dict[str, Any],
    tools: Iterable[Tool] = (),
    tool_choice: Choice | None = None,
) -> pb.ChatRequest:
    """Raises RequestError for what the wire cannot carry."""
    message = pb.ChatRequest()
    message.options.model = model
    with _naming("messages"):
        message.messages.extend(_said_to_wire(said) for said in messages)
    _sampling_to_wire(sampling, message.options.sampling)
    with _naming("chat_template_kwargs"):
        message.chat_template_kwargs.update(chat_template_kwargs)
    with _naming("tools"):
        message.tools.extend(_tool_to_wire(tool) for tool in tools)
    if tool_choice is not None:
        with _naming("tool_choice"):
            _choice_to_wire(tool_choice, message)
    return message


def _said_to_wire(said: Mapping[str, Any]) -> pb.ChatMessage:
    calls = [pb.ToolCall(**dataclasses.asdict(call)) for call in said.get("tool_calls") or ()]
    return pb.ChatMessage(**{**said, "tool_calls": calls})


def _tool_to_wire(tool: Tool) -> pb.Tool:
    parameters = json.dumps(tool.parameters, ensure_ascii=False) if tool.parameters else None
    return pb.Tool(name=tool.name, description=tool.description, parameters=parameters)


def _choice_to_wire(choice: Choice, message: pb.ChatRequest) -> None:
    message.parallel_tool_calls = choice.several
    if choice.name is not None:
        message.tool_choice.name = choice.name
    else:
        message.tool_choice.mode = MODES[choice.kind]


def question_from_wire(message: pb.ScoreRequest) -> Question:
    return Question(
        context=message.text if message.WhichOneof("context") != "token_ids" else list(message.token_ids.ids),
        continuations=[
            each.text if each.WhichOneof("continuation") != "token_ids" else list(each.token_ids.ids)
            for each in message.continuations
        ],
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        priority=message.priority,
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
    )


def question_to_wire(question: Question, model: str = "") -> pb.ScoreRequest:
    """Raises RequestError for what the wire cannot carry."""
    message = pb.ScoreRequest(model=model, add_special_tokens=question.add_special_tokens)
    with _naming("priority"):
        message.priority = question.priority
    if question.cache_salt is not None:
        with _naming("cache_salt"):
            message.cache_salt = question.cache_salt
    for name, text, target in (
        ("context", question.context, message),
        *(("continuations", each, message.continuations.add()) for each in question.continuations),
    ):
        with _naming(name):
            if isinstance(text, str):
                target.text = text
            else:
                target.token_ids.ids.extend(text)
                target.token_ids.SetInParent()
    return message


def scores_to_wire(scores: Iterable[ContinuationScore], usage: Usage, timing: Timing) -> pb.ScoreResponse:
    return pb.ScoreResponse(
        scores=[
            pb.ContinuationScore(
                token_ids=score.token_ids, logprobs=score.logprobs, total=score.total, is_greedy=score.is_greedy
            )
            for score in scores
        ],
        usage=usage_to_wire(usage),
        timing=timing_to_wire(timing),
    )


def scores_from_wire(message: pb.ScoreResponse) -> list[ContinuationScore]:
    return [ContinuationScore(list(s.token_ids), list(s.logprobs), s.is_greedy) for s in message.scores]


def _sampling_from_wire(message: pb.SamplingParams) -> SamplingParams:
    fields: dict[str, Any] = {name: getattr(message, name) for name in PLAIN_SAMPLING if message.HasField(name)}
    if len(message.logit_bias) > MAX_LOGIT_BIAS:  # before time is spent on them
        raise RequestError("logit_bias", f"{len(message.logit_bias)} entries given, at most {MAX_LOGIT_BIAS} allowed")
    length = message.WhichOneof("length")
    if length == "max_tokens":
        fields["max_tokens"] = message.max_tokens
    elif length == "fill_context" and message.fill_context:
        fields["max_tokens"] = None
    return SamplingParams(
        **fields,
        stop=list(message.stop) or None,
        stop_token_ids=list(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        structured_outputs=(
            _structured_from_wire(message.structured_outputs) if message.HasField("structured_outputs") else None
        ),
    )


def delta_to_wire(delta: Delta) -> pb.GenerateResponse:
    """The message of a delta. How an answer ended in error or was aborted is not part of it."""
    message = pb.GenerateResponse(
        request_id=delta.request_id,
        index=delta.index,
        token_ids=delta.token_ids,
        text=delta.text,
    )
    if delta.logprobs is not None:
        message.logprobs.extend(_logprobs_to_wire(delta.logprobs))
    if delta.prompt_logprobs is not None:
        message.prompt_logprobs.extend(_logprobs_to_wire(delta.prompt_logprobs))
    if delta.finish_reason in FINISH_REASONS:
        message.finish_reason = FINISH_REASONS[delta.finish_reason]
    if isinstance(delta.stop_reason, str):
        message.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    if isinstance(delta, ChatDelta):
        message.reasoning = delta.reasoning
        message.tool_calls.extend(pb.ToolCall(**dataclasses.asdict(call)) for call in delta.tool_calls)
    return message


def delta_from_wire(message: pb.GenerateResponse) -> Delta:
    return Delta(**_delta_fields(message))


def chat_delta_from_wire(message: pb.GenerateResponse) -> ChatDelta:
    calls = [ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls]
    return ChatDelta(**_delta_fields(message), reasoning=message.reasoning, tool_calls=calls)


def _delta_fields(message: pb.GenerateResponse) -> dict[str, Any]:
    names = {value: name for name, value in FINISH_REASONS.items()}
    which = message.WhichOneof("stop_reason")
    logprobs = [entries or [] for entries in map(_entries, message.logprobs)]
    return {
        "request_id": message.request_id,
        "index": message.index,
        "token_ids": list(message.token_ids),
        "text": message.text,
        "logprobs": logprobs or None,
        "prompt_logprobs": [_entries(entries) for entries in message.prompt_logprobs] or None,
        "finish_reason": names.get(message.finish_reason),
        "stop_reason": getattr(message, which) if which else None,
        "cached_tokens": message.usage.cached_tokens,
        "miss_cause": message.usage.miss_cause if message.usage.HasField("miss_cause") else None,
    }


def usage_to_wire(usage: Usage) -> pb.Usage:
    return pb.Usage(**dataclasses.asdict(usage))


def timing_to_wire(timing: Timing) -> pb.Timing:
    return pb.Timing(**dataclasses.asdict(timing))


def usage_from_wire(message: pb.Usage) -> Usage:
    cause = message.miss_cause if message.HasField("miss_cause") else None
    reasoning = message.reasoning_tokens if message.HasField("reasoning_tokens") else None
    return Usage(message.prompt_tokens, message.cached_tokens, message.completion_tokens, cause, reasoning)


def timing_from_wire(message: pb.Timing) -> Timing:
    return Timing(
        message.first_token_seconds if message.HasField("first_token_seconds") else None,
        message.total_seconds,
        message.queue_seconds if message.HasField("queue_seconds") else None,
    )


def model_info_to_wire(info: dict[str, Any]) -> pb.GetModelInfoResponse:
    """The message of `Engine.model_info()`."""
    texts_and_sizes = ("model", "architecture", "dtype", "vocab_size", "max_model_len", "num_layers", "num_parameters")
    names = (*texts_and_sizes, "has_tokenizer", "eos_token_ids", "bytes_per_slot", "bytes_per_page")
    return pb.GetModelInfoResponse(**{name: info[name] for name in names})


def status_to_wire(status: dict[str, Any]) -> pb.GetStatusResponse:
    """The message of `Engine.status()`."""
    numbers = ("running", "waiting", "compilations_after_ready", "requests", "steps", "prompt_tokens", "output_tokens")
    message = pb.GetStatusResponse(
        **{name: status[name] for name in (*numbers, "preemptions", "failed_steps", "failed_sequences")},
        memory_bytes=status["memory_bytes"],
    )
    for name in ("pages", "slots", "snapshots"):
        if name in status:
            getattr(message, name).CopyFrom(pb.Pool(**status[name]))
    if "prefix_cache" in status:
        counts = {field.name: status["prefix_cache"][field.name] for field in pb.PrefixCache.DESCRIPTOR.fields}
        message.prefix_cache.CopyFrom(pb.PrefixCache(**counts))
    for name, tier in status.get("tiers", {}).items():
        fields = {field.name: tier[field.name] for field in pb.Tier.DESCRIPTOR.fields}
        message.tiers[name].CopyFrom(pb.Tier(**fields))
    return message


def _logprobs_to_wire(entries: Sequence[TokenLogprobs | None]) -> Iterable[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(entries=[pb.TokenLogprob(token_id=token, logprob=value) for token, value in position or ()])
        for position in entries
    ]


def _entries(message: pb.TokenLogprobs) -> TokenLogprobs | None:
    return [(entry.token_id, entry.logprob) for entry in message.entries] or None


class _naming:
    """Turns protobuf's complaint about a value into a RequestError that names the field."""

    def __init__(self, field: str):
        self.field = field

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, TypeError | ValueError | KeyError) and not isinstance(error, RequestError):
            raise RequestError(self.field, str(error)) from error
