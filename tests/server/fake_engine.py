"""FakeEngine: the engine's interface over an alphabet instead of a model, with every call recorded.

Answer `i` to a prompt of `p` tokens is the letters from number `p + i` on, one per step. Faults are ordered by the
prompt's text: `nan` fails the sequence, `die` kills the engine thread, `stick` holds a step up for two
seconds, `bug` raises in submit.
"""

import threading
import time
from dataclasses import dataclass, field

from jhybrid.errors import QueueFullError, RequestError
from jhybrid.occupancy import Holder, Occupancy
from jhybrid.request import Delta, Request
from jhybrid.tokenizer import ByteTokenizer, Tokenizer

MAX_MODEL_LEN = 2000


@dataclass
class Running:
    request: Request
    prompt: list[int]
    made: dict[int, int] = field(default_factory=dict)  # tokens so far by answer


class FakeIntake:
    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def check(self, request: Request) -> list[int]:
        request.validate(263)
        ids = request.prompt_token_ids
        if request.prompt is not None:
            ids = self.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        if not ids:
            raise RequestError("prompt", "is empty; give some text")
        for token in ids:
            if not 0 <= token < 263:
                raise RequestError("prompt_token_ids", f"{token} must be in [0, 263)")
        if len(ids) >= MAX_MODEL_LEN:
            raise RequestError("prompt", f"{len(ids)} tokens leave no room in max_model_len={MAX_MODEL_LEN}")
        return list(ids)

    def grammar(self, request: Request) -> None:
        del request


class FakeEngine:
    """At most `slots` requests run, others wait; every step adds one letter to each answer that runs."""

    def __init__(self, slots: int = 4, max_queue: int = 8, step_seconds: float = 0.0):
        self.tokenizer: Tokenizer | None = ByteTokenizer(263)
        self.intake = FakeIntake(ByteTokenizer(263))
        self.slots, self.max_queue, self.step_seconds = slots, max_queue, step_seconds
        self.running: dict[str, Running] = {}
        self.waiting: dict[str, Running] = {}
        self.aborted: list[str] = []
        self.submitted: list[Request] = []
        self.threads: set[int] = set()
        self.steps = 0
        self.looks = 0  # how often it was asked for work
        self.gate = threading.Event()  # cleared: steps wait
        self.gate.set()
        self.is_held = False
        self.closed = False
        self.flushes = 0
        self.script: bytes | None = None
        """What it says instead of letters, a byte in each step."""
        self._told: list[Delta] = []

    @property
    def steps_ended(self) -> int:
        return self.steps

    @property
    def has_work(self) -> bool:
        self.looks += 1
        return bool(self.running or self.waiting or self._told)

    def submit(self, request: Request) -> str:
        self.threads.add(threading.get_ident())
        prompt = self.intake.check(request)
        text = bytes(token for token in prompt if token < 256).decode()
        if text == "bug":
            raise KeyError("a bug in submit")
        if len(self.waiting) >= self.max_queue:
            raise QueueFullError(f"{len(self.waiting)} sequences wait and max_queue is {self.max_queue}")
        assert request.request_id is not None
        self.submitted.append(request)
        self.waiting[request.request_id] = Running(request, prompt)
        return request.request_id

    def abort(self, request_id: str) -> bool:
        self.threads.add(threading.get_ident())
        entry = self.running.pop(request_id, None) or self.waiting.pop(request_id, None)
        if entry is None:
            return False
        self.aborted.append(request_id)
        for index in range(entry.request.sampling.n):
            if entry.made.get(index, 0) >= 0:
                self._told.append(Delta(request_id, index, finish_reason="abort"))
        return True

    def step(self) -> list[Delta]:
        self.threads.add(threading.get_ident())
        time.sleep(self.step_seconds)
        self.is_held = not self.gate.is_set()
        self.gate.wait(10)
        self.steps += 1
        while self.waiting and len(self.running) < self.slots:
            name = min(self.waiting, key=lambda n: self.waiting[n].request.priority)
            self.running[name] = self.waiting.pop(name)
        deltas, self._told = self._told, []
        for name, entry in list(self.running.items()):
            for index in range(entry.request.sampling.n):
                if entry.made.get(index, 0) >= 0:
                    deltas.append(self._advance(name, entry, index))
            if all(entry.made[i] < 0 for i in range(entry.request.sampling.n)):
                del self.running[name]
        return deltas

    def _advance(self, name: str, entry: Running, index: int) -> Delta:
        sampling = entry.request.sampling
        text = bytes(token for token in entry.prompt if token < 256).decode()
        if text == "die":
            raise RuntimeError("the device is gone")
        made = entry.made.get(index, 0)
        if text == "stick" and made == 1:
            time.sleep(2)
        delta = Delta(name, index, cached_tokens=3)
        if text == "nan" and index == 0 and made == 2:
            delta.finish_reason, delta.error = "error", "the model's logits at position 5 are NaN or infinite"
            entry.made[index] = -1
            return delta
        if sampling.prompt_logprobs is not None and index == 0 and made == 0:
            start = max(1, sampling.prompt_logprobs_from)
            delta.prompt_logprobs = [None] * start + [[(token, -0.25)] for token in entry.prompt[start:]]
        if sampling.max_tokens == 0:
            delta.finish_reason, entry.made[index] = "length", -1
            return delta
        token = letter(len(entry.prompt), index, made) if self.script is None else self.script[made]
        delta.token_ids, delta.text = [token], chr(token)
        if sampling.logprobs is not None:
            delta.logprobs = [[(token, -0.5), *((98, -1.5 - i) for i in range(sampling.logprobs))]]
        made += 1
        if delta.text in sampling.stop_strings:
            delta.finish_reason, delta.stop_reason, delta.text = "stop", delta.text, ""
        elif token in sampling.stop_token_ids:
            delta.finish_reason, delta.stop_reason = "stop", token
        elif self.script is not None and made == len(self.script):
            delta.finish_reason = "stop"
        elif made == (MAX_MODEL_LEN - len(entry.prompt) if sampling.max_tokens is None else sampling.max_tokens):
            delta.finish_reason = "length"
        entry.made[index] = -1 if delta.finish_reason else made
        return delta

    def idle(self) -> bool:
        return False

    def flush_cache(self) -> None:
        self.threads.add(threading.get_ident())
        self.flushes += 1

    def status(self) -> dict:
        self.threads.add(threading.get_ident())
        used = len(self.running)
        return {
            "running": used,
            "waiting": len(self.waiting),
            "pages": {"total": 100, "free": 100 - used, "used": used, "cached": 0},
            "slots": {"total": self.slots, "free": self.slots - used, "used": used, "cached": 0},
            "snapshots": {"total": 0, "free": 0, "used": 0, "cached": 0},
            "memory_bytes": {"weights": 10, "kv": 20, "state": 30, "scratch": 40},
            "memory_total_bytes": 100,
            "compilations_after_ready": 0,
            "requests": len(self.submitted),
            "steps": self.steps,
            "prompt_tokens": 0,
            "output_tokens": 0,
            "preemptions": 0,
            "failed_steps": 0,
            "failed_sequences": 0,
            "nan_events": 0,
            "scheduled_tokens": 0,
            "padding_tokens": 0,
            "seconds": {"step": 0.0},
            "step_seconds": {},
        }

    def occupancy(self) -> Occupancy:
        holders = [
            Holder(name, 0, len(entry.prompt), max(entry.made.values(), default=0), 3, len(entry.prompt), 0, 0, rows)
            for number, (name, entry) in enumerate(self.running.items())
            for rows in [{"slots": [number], "pages": [2 * number, 2 * number + 1], "snapshots": []}]
        ]
        used = len(holders)
        taken = {
            "slots": used * b"\1" + (self.slots - used) * b"\0",
            "pages": 2 * used * b"\1" + (100 - 2 * used) * b"\0",
        }
        return Occupancy(holders, taken)

    def degraded(self) -> dict[str, str]:
        return {}

    def model_info(self) -> dict:
        return {
            "model": "path/to/fake",
            "architecture": "FakeForCausalLM",
            "vocab_size": 263,
            "max_model_len": MAX_MODEL_LEN,
            "dtype": "float32",
            "num_layers": 2,
            "num_parameters": 1234,
            "eos_token_ids": [257, 258],
            "has_tokenizer": True,
            "bytes_per_slot": 1024,
            "bytes_per_page": 2048,
        }

    def close(self) -> None:
        self.closed = True


def letter(prompt_tokens: int, index: int, position: int) -> int:
    """The token that the fake makes."""
    return 97 + (prompt_tokens + index + position) % 26


def answer_text(prompt_tokens: int, length: int, index: int = 0) -> str:
    """The text that the fake answers with."""
    return "".join(chr(letter(prompt_tokens, index, i)) for i in range(length))
