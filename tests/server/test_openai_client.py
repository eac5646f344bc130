"""The `openai` package against the server: what its users see, synchronous, asynchronous and streaming."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server.keys import Keys
from tests.server.fake_engine import FakeEngine, answer_text
from tests.server.serving import Served, eventually, serving

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_TOKENS = 1 + len("user:hi|")


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(step_seconds=0.002)
    engine.tokenizer = ByteTokenizer(263, chat_template=TEMPLATE)
    return engine


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(lambda: engine, keys=Keys(["secret"])) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "jhybrid"


def test_completions_whole_and_streamed(client: openai.OpenAI):
    whole = client.completions.create(model="fake", prompt="abc", max_tokens=6, logprobs=1, echo=True)
    assert whole.choices[0].text == "abc" + answer_text(4, 6)
    assert whole.usage is not None and whole.usage.total_tokens == 10
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs == [None, *[-0.25] * 3, *[-0.5] * 6]
    options: dict = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(model="fake", prompt="abc", max_tokens=6, **options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == answer_text(4, 6)
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 10


def test_chats_whole_and_streamed(client: openai.OpenAI):
    options: dict = {"model": "fake", "messages": MESSAGES, "max_completion_tokens": 4}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == answer_text(CHAT_TOKENS, 4)
    assert [len(token.top_logprobs) for token in whole.choices[0].logprobs.content] == [2] * 4
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer_text(CHAT_TOKENS, 4)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_errors_are_the_packages_own(client: openai.OpenAI, served: Served):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="abc", n=0)
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="abc")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake", prompt="nan")
    with pytest.raises(openai.APIError, match="NaN or infinite"):
        list(client.completions.create(model="fake", prompt="nan", stream=True))


def test_async_streams_that_are_left_end_their_requests(served: Served, engine: FakeEngine):
    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as client:

            async def first_text() -> str:
                stream = await client.completions.create(model="fake", prompt="abc", max_tokens=1900, stream=True)
                async with stream:
                    async for chunk in stream:
                        return chunk.choices[0].text
                return ""

            return await asyncio.gather(*(first_text() for _ in range(4)))

    texts = asyncio.run(work())  # of a token, or of several where the reader was late
    assert len(texts) == 4 and all(text and answer_text(4, 1900).startswith(text) for text in texts)
    eventually(lambda: not engine.running and len(engine.aborted) == 4, 1.0)
