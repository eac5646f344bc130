"""Synthetic request traces with published shapes, for `prefix_cache.py`: who asks what, in which order.

Lengths follow what has been reported of such workloads: chats of several turns with answers of some hundred tokens
(ShareGPT, LMSys), agents that share a tool prompt of thousands of tokens and append tool outputs of hundreds (SWE-bench
trajectories), few-shot evaluation with a prefix per task, and tree search with a branching factor. Tokens are random:
only what is equal and what is not matters to a cache.
"""

from collections.abc import Callable

import numpy as np

from jhybrid.cache.replay import Visit

Random = np.random.Generator


def text(rng: Random, low: int, high: int) -> list[int]:
    """So many fresh tokens."""
    return rng.integers(0, 1 << 30, rng.integers(low, high + 1)).tolist()


def interleave(rng: Random, sessions: list[list[Visit]], alive: int) -> list[Visit]:
    """Visits of sessions of which `alive` run at a time, each in its own order."""
    waiting, running, order = sessions[::-1], [], []
    while waiting or running:
        while waiting and len(running) < alive:
            running.append(iter(waiting.pop()))
        at = int(rng.integers(len(running)))
        visit = next(running[at], None)
        if visit is None:
            running.pop(at)
        else:
            order.append(visit)
    return order


def conversation(
    rng: Random, start: list[int], turns: int, asked: tuple[int, int], said: tuple[int, int]
) -> list[Visit]:
    """One session: every prompt is all that was said before and something new."""
    history, visits = list(start), []
    for _ in range(turns):
        history = history + text(rng, *asked)
        answer = text(rng, *said)
        visits.append(Visit(None, history, answer))
        history = history + answer
    return visits


def chat(rng: Random) -> list[Visit]:
    """300 chats of 2 to 12 turns under one system prompt, 40 at a time."""
    system = text(rng, 120, 120)
    sessions = [conversation(rng, system, int(rng.integers(2, 13)), (20, 200), (50, 400)) for _ in range(300)]
    return interleave(rng, sessions, 40)


def agents(rng: Random) -> list[Visit]:
    """120 agents of 5 kinds, each with a tool prompt of 2000 to 6000 tokens; 10 to 30 short turns, 24 at a time."""
    kinds = [text(rng, 2000, 6000) for _ in range(5)]
    sessions = []
    for _ in range(120):
        start = kinds[int(rng.integers(5))] + text(rng, 100, 800)
        sessions.append(conversation(rng, start, int(rng.integers(10, 31)), (50, 600), (30, 150)))
    return interleave(rng, sessions, 24)


def few_shot(rng: Random) -> list[Visit]:
    """40 tasks of 60 questions each behind 800 to 2000 tokens of examples; 4 tasks run side by side."""
    sessions = []
    for _ in range(40):
        examples = text(rng, 800, 2000)
        sessions.append([Visit(None, examples + text(rng, 40, 160), text(rng, 1, 20)) for _ in range(60)])
    return interleave(rng, sessions, 4)


def tree_search(rng: Random) -> list[Visit]:
    """60 problems; every thought is continued 4 times, the best 2 of a level go on, 5 levels deep; 6 at a time."""
    sessions = []
    for _ in range(60):
        level, visits = [text(rng, 300, 800)], []
        for _ in range(5):
            thoughts = [(prompt, text(rng, 60, 160)) for prompt in level for _ in range(4)]
            visits += [Visit(None, prompt, thought) for prompt, thought in thoughts]
            chosen = rng.permutation(len(thoughts))[:2]
            level = [thoughts[i][0] + thoughts[i][1] + text(rng, 10, 30) for i in chosen]
        sessions.append(visits)
    return interleave(rng, sessions, 6)


TRACES: dict[str, Callable[[Random], list[Visit]]] = {
    "chat": chat,
    "agents": agents,
    "few-shot": few_shot,
    "tree search": tree_search,
}
