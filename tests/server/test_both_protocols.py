"""HTTP and gRPC over the real engine on a small hybrid with Hugging Face's numbers: same answers whichever way."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server.client import Answer
from jhybrid_server.scoring import Question
from tests.server.http_client import ask, events, hang
from tests.server.serving import Served, eventually, serving

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "nemotron_h_dense"
COMPLETIONS = "/v1/completions"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"

Told = tuple[list[str], list[str | None], dict[str, int]]
"""Texts, finish reasons and usage."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, directory)
    ByteTokenizer(chat_template=TEMPLATE).save(directory)
    config = EngineConfig(
        str(directory),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        page_size=8,
        chunk_size=8,
        enable_prefix_caching=True,
    )
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    with serving(lambda: engine) as served:
        yield served


@pytest.fixture(autouse=True)
def leaves_nothing(engine: Engine, served: Served) -> Iterator[None]:
    yield
    eventually(lambda: all_given_back(served), 2.0)
    served.client.flush_cache()
    status = served.client.status()
    assert (status.pages.used, status.slots.used, status.snapshots.used) == (0, 0, 0)
    assert status.compilations_after_ready == 0


def all_given_back(served: Served) -> bool:
    status = served.client.status()
    return not (status.running or status.waiting or status.pages.used or status.slots.used)


def http_whole(served: Served, body: dict) -> Told:
    answer = ask(served.http.port, COMPLETIONS, body).json
    choices = answer["choices"]
    return [c["text"] for c in choices], [c["finish_reason"] for c in choices], _usage(answer["usage"])


def http_stream(served: Served, body: dict) -> Told:
    *chunks, last, _ = events(served.http.port, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    texts, ends = [""] * body.get("n", 1), [None] * body.get("n", 1)
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    return texts, ends, _usage(last["usage"])


def grpc_whole(served: Served, body: dict) -> Told:
    return _told(served.client.generate(_request(body)))


def grpc_stream(served: Served, body: dict) -> Told:
    stream = served.client.stream(_request(body))
    texts = [""] * body.get("n", 1)
    for delta in stream:
        texts[delta.index] += delta.text
    told = _told(stream.answer())
    assert told[0] == texts
    return told


WAYS = (http_whole, http_stream, grpc_whole, grpc_stream)


def _request(body: dict[str, Any]) -> Request:
    sampling = {name: value for name, value in body.items() if name != "prompt"}
    return Request(prompt=body["prompt"], sampling=SamplingParams(**sampling))


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    return {
        "prompt": usage["prompt_tokens"],
        "completion": usage["completion_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


def _told(answer: Answer) -> Told:
    usage = answer.usage
    counts = {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens, "cached": usage.cached_tokens}
    completions = answer.output.completions
    return [c.text for c in completions], [c.finish_reason for c in completions], counts


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 40, "seed": 3},
        {"max_tokens": 40, "seed": 4, "n": 2, "temperature": 0.8},
        {"max_tokens": 1, "seed": 5},
        {"max_tokens": 0},
        {"max_tokens": 200, "seed": 6, "ignore_eos": True, "temperature": 1.5},
        {"max_tokens": 60, "seed": 7, "min_tokens": 20, "repetition_penalty": 1.3, "top_k": 40},
    ],
    ids=str,
)
def test_four_ways_tell_the_same(served: Served, options: dict):
    body = {"prompt": "What light? 😀", **options}
    seen = []
    for way in WAYS:
        seen.append(way(served, body))
        served.client.flush_cache()  # what is cached is part of what is told
    assert seen == [seen[0]] * 4
    assert seen[0][2]["prompt"] == 1 + len(body["prompt"].encode())
    if options["max_tokens"] == 0 or "ignore_eos" in options:
        assert seen[0][2]["completion"] == options["max_tokens"]
    if options["max_tokens"] >= 40:  # long enough to tell the prompts apart
        assert http_whole(served, body | {"prompt": "Xhat light? 😀"})[0] != seen[0][0]


def test_a_hit_is_told_the_same_four_ways(served: Served):
    body = {"prompt": "What light through yonder window breaks? It is the east", "max_tokens": 8, "temperature": 0}
    http_whole(served, body)
    seen = [way(served, body) for way in WAYS]
    assert seen == [seen[0]] * 4
    assert seen[0][2]["cached"] > 0


def test_stop_strings_are_never_streamed(served: Served, engine: Engine):
    body = {"prompt": "abc", "max_tokens": 60, "seed": 1, "ignore_eos": True, "temperature": 1.0}
    [text], _, _ = http_whole(served, body)
    stop = text[20:24]
    expected = text[: text.index(stop)]
    for way in WAYS:
        texts, ends, _ = way(served, body | {"stop": [stop, stop + "never"]})
        assert (texts, ends) == ([expected], ["stop"])


def test_echoed_logprobs_are_hugging_faces(served: Served):
    prompt, logits = _golden()
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "temperature": 0}
    for max_tokens in (0, 1):
        [choice] = ask(served.http.port, COMPLETIONS, body | {"max_tokens": max_tokens}).json["choices"]
        got = choice["logprobs"]["token_logprobs"]
        assert len(got) == len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens
        assert got[0] is None
        scored = [wanted[at, token] for at, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(got[1 : len(prompt)], scored, atol=1e-3)
        top = choice["logprobs"]["top_logprobs"][5]
        assert max(top.values()) == pytest.approx(wanted[4].max(), abs=1e-3)


def test_scored_continuations_are_hugging_faces(served: Served):
    prompt, logits = _golden()
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    split = 60
    other = [*prompt[split:-1], (prompt[-1] + 1) % 200]
    scores = served.client.score(Question(prompt[:split], [prompt[split:], other, [int(wanted[split - 1].argmax())]]))
    for score, tokens in zip(scores, (prompt[split:], other), strict=False):
        assert score.token_ids == tokens
        expected = [wanted[split - 1 + i, token] for i, token in enumerate(tokens)]
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-3)
        assert score.total == pytest.approx(sum(expected), abs=0.01)
    assert [score.is_greedy for score in scores] == [False, False, True]
    assert served.client.status().prefix_cache.hit_tokens > 0  # the context was shared


def test_chat_counts_what_the_template_renders(served: Served, engine: Engine):
    messages = [{"role": "user", "content": "hi"}]
    answer = ask(served.http.port, "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0})
    assert answer.json["usage"]["prompt_tokens"] == len("user:hi|") + 1
    stream = served.client.chat(messages, SamplingParams(max_tokens=5, temperature=0))
    assert "".join(d.text for d in stream) == answer.json["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnects_while_prefilling_decoding_and_waiting(served: Served, stream: bool):
    body = {"prompt": "x" * 200, "max_tokens": 50, "ignore_eos": True, "n": 2, "stream": stream}
    for pause in (0.0, 0.005, 0.02, 0.05):
        hanging = [hang(served.http.port, COMPLETIONS, body) for _ in range(6)]
        time.sleep(pause)
        for each in hanging:
            each.close()
        eventually(lambda: all_given_back(served), 2.0)
    texts, _, _ = http_whole(served, {"prompt": "abc", "max_tokens": 5, "temperature": 0})
    [output] = served.run(_alone(served, Request(prompt="abc", sampling=SamplingParams(max_tokens=5, temperature=0))))
    assert texts == [output]


async def _alone(served: Served, request: Request) -> list[str]:
    async with served.desk.call([request]) as call:
        return [delta.text for delta in (await call.answers()).values()]


def _golden() -> tuple[list[int], np.ndarray]:
    with np.load(GOLDEN / "goldens.npz") as file:
        return [int(token) for token in file["prompt"]], file["full_logits"].astype(np.float64)
