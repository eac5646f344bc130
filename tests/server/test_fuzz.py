"""Random requests over both protocols to the real engine: an answer or a refusal, never a 500, and nothing is lost."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jhybrid.errors import RequestError
from jhybrid.request import Request, SamplingParams
from jhybrid_server.openai_schema import ChatBody, CompletionBody
from tests.server.http_client import ask
from tests.server.serving import Served
from tests.server.test_wire import samplings

scalars = st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
several = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bodies(kind: type[CompletionBody] | type[ChatBody], **most: st.SearchStrategy) -> st.SearchStrategy[dict]:
    """Bodies with some fields of a kind, each with any value at all, and often with what they cannot do without."""
    anything = {name: values for name in kind.model_fields if name not in ("stream", *most)}
    return st.builds(lambda a, b: a | b, st.fixed_dictionaries({}, optional=anything), st.fixed_dictionaries(most))


@several
@given(bodies(CompletionBody, prompt=texts | values), st.booleans())
def test_completions(hybrid: Served, body: dict, stream: bool):
    reply = ask(hybrid.http.port, "/v1/completions", body | {"stream": stream})
    assert reply.status in (200, 400, 404), (body, reply.raw)
    assert stream or reply.status != 200 or reply.json["choices"]


@several
@given(bodies(ChatBody, messages=st.just([{"role": "user", "content": "hi"}]) | values, max_tokens=st.integers(0, 20)))
def test_chats(hybrid: Served, body: dict):
    reply = ask(hybrid.http.port, "/v1/chat/completions", body)
    assert reply.status in (200, 400, 404), (body, reply.raw)


@several
@given(samplings, texts)
def test_grpc(hybrid: Served, sampling: SamplingParams, prompt: str):
    try:
        hybrid.client.generate(Request(prompt=prompt, sampling=sampling), timeout=20)
    except RequestError:
        return
