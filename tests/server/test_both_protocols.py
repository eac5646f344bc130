"""HTTP and gRPC over the real engine on a small hybrid with Hugging Face's numbers: same answers whichever way."""

import time
from typing import Any

import numpy as np
import pytest

from jhybrid import Request, SamplingParams
from jhybrid_server.client import Answer
from jhybrid_server.scoring import Question
from tests.server.conftest import CHECKPOINT, all_given_back
from tests.server.http_client import ask, events, hang
from tests.server.serving import Served, eventually

COMPLETIONS = "/v1/completions"

Told = tuple[list[str], list[str | None], dict[str, int]]
"""Texts, finish reasons and usage."""


def http_whole(hybrid: Served, body: dict) -> Told:
    answer = ask(hybrid.http.port, COMPLETIONS, body).json
    choices = answer["choices"]
    return [c["text"] for c in choices], [c["finish_reason"] for c in choices], _usage(answer["usage"])


def http_stream(hybrid: Served, body: dict) -> Told:
    *chunks, last, _ = events(hybrid.http.port, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    texts, ends = [""] * body.get("n", 1), [None] * body.get("n", 1)
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    return texts, ends, _usage(last["usage"])


def grpc_whole(hybrid: Served, body: dict) -> Told:
    return _told(hybrid.client.generate(_request(body)))


def grpc_stream(hybrid: Served, body: dict) -> Told:
    stream = hybrid.client.stream(_request(body))
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
def test_four_ways_tell_the_same(hybrid: Served, options: dict):
    body = {"prompt": "What light? 😀", **options}
    seen = []
    for way in WAYS:
        seen.append(way(hybrid, body))
        hybrid.client.flush_cache()  # what is cached is part of what is told
    assert seen == [seen[0]] * 4
    assert seen[0][2]["prompt"] == 1 + len(body["prompt"].encode())
    if options["max_tokens"] == 0 or "ignore_eos" in options:
        assert seen[0][2]["completion"] == options["max_tokens"]
    if options["max_tokens"] >= 40:  # long enough to tell the prompts apart
        assert http_whole(hybrid, body | {"prompt": "Xhat light? 😀"})[0] != seen[0][0]


def test_a_hit_is_told_the_same_four_ways(hybrid: Served):
    body = {"prompt": "What light through yonder window breaks? It is the east", "max_tokens": 8, "temperature": 0}
    http_whole(hybrid, body)
    seen = [way(hybrid, body) for way in WAYS]
    assert seen == [seen[0]] * 4
    assert seen[0][2]["cached"] > 0


def test_stop_strings_are_never_streamed(hybrid: Served):
    body = {"prompt": "abc", "max_tokens": 60, "seed": 1, "ignore_eos": True, "temperature": 1.0}
    [text], _, _ = http_whole(hybrid, body)
    stop = text[20:24]
    expected = text[: text.index(stop)]
    for way in WAYS:
        texts, ends, _ = way(hybrid, body | {"stop": [stop, stop + "never"]})
        assert (texts, ends) == ([expected], ["stop"])


def test_echoed_logprobs_are_hugging_faces(hybrid: Served):
    prompt, logits = _golden()
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "temperature": 0}
    for max_tokens in (0, 1):
        [choice] = ask(hybrid.http.port, COMPLETIONS, body | {"max_tokens": max_tokens}).json["choices"]
        got = choice["logprobs"]["token_logprobs"]
        assert len(got) == len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens
        assert got[0] is None
        scored = [wanted[at, token] for at, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(got[1 : len(prompt)], scored, atol=1e-3)
        top = choice["logprobs"]["top_logprobs"][5]
        assert max(top.values()) == pytest.approx(wanted[4].max(), abs=1e-3)


def test_scored_continuations_are_hugging_faces(hybrid: Served):
    prompt, logits = _golden()
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    split = 60
    other = [*prompt[split:-1], (prompt[-1] + 1) % 200]
    scores = hybrid.client.score(Question(prompt[:split], [prompt[split:], other, [int(wanted[split - 1].argmax())]]))
    for score, tokens in zip(scores, (prompt[split:], other), strict=False):
        assert score.token_ids == tokens
        expected = [wanted[split - 1 + i, token] for i, token in enumerate(tokens)]
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-3)
        assert score.total == pytest.approx(sum(expected), abs=0.01)
    assert [score.is_greedy for score in scores] == [False, False, True]
    assert hybrid.client.status().prefix_cache.hit_tokens > 0  # the context was shared


def test_chat_counts_what_the_template_renders(hybrid: Served):
    messages = [{"role": "user", "content": "hi"}]
    answer = ask(hybrid.http.port, "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0})
    assert answer.json["usage"]["prompt_tokens"] == len("user:hi|") + 1
    stream = hybrid.client.chat(messages, SamplingParams(max_tokens=5, temperature=0))
    assert "".join(d.text for d in stream) == answer.json["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnects_while_prefilling_decoding_and_waiting(hybrid: Served, stream: bool):
    body = {"prompt": "x" * 200, "max_tokens": 50, "ignore_eos": True, "n": 2, "stream": stream}
    for pause in (0.0, 0.005, 0.02, 0.05):
        hanging = [hang(hybrid.http.port, COMPLETIONS, body) for _ in range(6)]
        time.sleep(pause)
        for each in hanging:
            each.close()
        eventually(lambda: all_given_back(hybrid), 2.0)
    texts, _, _ = http_whole(hybrid, {"prompt": "abc", "max_tokens": 5, "temperature": 0})
    [output] = hybrid.run(_alone(hybrid, Request(prompt="abc", sampling=SamplingParams(max_tokens=5, temperature=0))))
    assert texts == [output]


async def _alone(hybrid: Served, request: Request) -> list[str]:
    async with hybrid.desk.call([request]) as call:
        return [delta.text for delta in (await call.answers()).values()]


def _golden() -> tuple[list[int], np.ndarray]:
    with np.load(CHECKPOINT / "goldens.npz") as file:
        return [int(token) for token in file["prompt"]], file["full_logits"].astype(np.float64)
