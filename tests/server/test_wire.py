"""Wire: what goes through protobuf comes back the same, and what cannot go through is refused by name."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jhybrid.errors import RequestError
from jhybrid.request import Delta, Request, SamplingParams
from jhybrid.structured_outputs import Reasoning, StructuredOutputs
from jhybrid_server.v1 import inference_pb2 as pb
from jhybrid_server.wire import delta_from_wire, delta_to_wire, request_from_wire, request_to_wire

structured = st.one_of(
    st.builds(StructuredOutputs, json=st.text()),
    st.just(StructuredOutputs(json_object=True)),
    st.builds(StructuredOutputs, regex=st.text()),
    st.builds(StructuredOutputs, choice=st.lists(st.text(), max_size=3)),
    st.builds(StructuredOutputs, grammar=st.text()),
)
REASONED = StructuredOutputs(regex="a", reasoning=Reasoning("<", ">", True))
whole = st.integers(-(2**63), 2**63 - 1)
number = st.floats(allow_nan=False)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.none() | whole,
    min_tokens=whole,
    temperature=number,
    top_k=whole,
    top_p=number,
    min_p=number,
    repetition_penalty=number,
    presence_penalty=number,
    frequency_penalty=number,
    logit_bias=st.dictionaries(whole, number, max_size=3),
    seed=st.none() | whole,
    n=whole,
    logprobs=st.none() | whole,
    prompt_logprobs=st.none() | whole,
    stop=st.none() | st.lists(st.text(), min_size=1, max_size=3),
    stop_token_ids=st.lists(whole, max_size=3),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    structured_outputs=st.none() | structured,
)
prompts = st.builds(lambda text: {"prompt": text}, st.text()) | st.builds(
    lambda ids: {"prompt_token_ids": ids}, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)
)


def test_every_sampling_field_is_carried():
    """The strategy above names every field, so that a new one cannot be forgotten on the wire."""
    covered = {f.name for f in dataclasses.fields(SamplingParams)}
    ours = {f.name for f in pb.SamplingParams.DESCRIPTOR.fields}
    assert covered == ours - {"fill_context"}


@settings(max_examples=60, deadline=None)
@given(prompt=prompts, sampling=samplings, name=st.none() | st.text(min_size=1), special=st.booleans())
def test_requests_come_back_equal(prompt: dict, sampling: SamplingParams, name: str | None, special: bool):
    request = Request(**prompt, sampling=sampling, request_id=name, priority=-3, add_special_tokens=special)
    message = pb.GenerateRequest.FromString(request_to_wire(request).SerializeToString())
    assert request_from_wire(message) == request


def test_unset_means_default():
    message = pb.GenerateRequest(text="hi")
    assert request_from_wire(message) == Request(prompt="hi")


def test_nan_reaches_the_engine_which_refuses_it():
    request = request_from_wire(request_to_wire(Request(prompt="a", sampling=SamplingParams(temperature=math.nan))))
    with pytest.raises(RequestError, match="temperature: must be finite"):
        request.sampling.validate(10)


def test_prompt_missing():
    with pytest.raises(RequestError, match="prompt: is missing"):
        request_from_wire(pb.GenerateRequest())


@pytest.mark.parametrize(
    ("field", "request_fields"),
    [
        ("prompt_token_ids", {"prompt_token_ids": [2**31]}),
        ("prompt_token_ids", {"prompt_token_ids": [1.5]}),
        ("prompt_token_ids", {"prompt_token_ids": ["5"]}),
        ("max_tokens", {"sampling": SamplingParams(max_tokens=10**30)}),
        ("seed", {"sampling": SamplingParams(seed=2**63)}),
        ("temperature", {"sampling": SamplingParams(temperature="hot")}),  # pyright: ignore[reportArgumentType]
        ("stop", {"sampling": SamplingParams(stop=[3])}),  # pyright: ignore[reportArgumentType]
        ("logit_bias", {"sampling": SamplingParams(logit_bias={"abc": 1.0})}),  # pyright: ignore[reportArgumentType]
        ("prompt", {"prompt": "a\ud800"}),
        ("structured_outputs", {"sampling": SamplingParams(structured_outputs=StructuredOutputs())}),
        (
            "structured_outputs.reasoning",
            {"sampling": SamplingParams(structured_outputs=REASONED)},
        ),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(field: str, request_fields: dict):
    with pytest.raises(RequestError) as caught:
        request_to_wire(Request(**{"prompt_token_ids": None, **request_fields}))
    assert caught.value.field == field


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=4),
    text=st.text(),
    finish=st.sampled_from([(None, None), ("stop", 7), ("stop", "\n\n"), ("length", None)]),
    value=st.floats(width=32, allow_nan=False),
)
def test_deltas_come_back_equal(tokens: list[int], text: str, finish: tuple, value: float):
    entry = [(5, value), (6, -1.5)]
    delta = Delta(
        "r",
        2,
        token_ids=tokens,
        text=text,
        logprobs=[entry for _ in tokens] or None,
        prompt_logprobs=[None, entry, entry],
        finish_reason=finish[0],
        stop_reason=finish[1],
    )
    message = pb.GenerateResponse.FromString(delta_to_wire(delta).SerializeToString())
    assert delta_from_wire(message) == delta
