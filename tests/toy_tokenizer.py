"""A tokenizer for the toy model's 64 tokens: letters, digits, JSON, pieces of several characters and of half a one."""

from collections.abc import Iterable
from dataclasses import replace

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from jhybrid.tokenizer import decode_bytes
from tests.toy_model import EOS, VOCAB, ToyRunner, toy_model

[END] = EOS
PIECES = [bytes((c,)) for c in b'abcdexyzso0123456789{}[]",:-. \n'] + [
    *(b'{"', b'":', b"true", b"false", b"null", b"ab", b"12", b"aaa", b'",', b"tru", b"yes", b"no", b"n"),
    *(b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"\xa9a"),
]
TEXTS = {i + (i >= END): piece for i, piece in enumerate(PIECES)}
"""By token. Those after the last are padding of the vocabulary."""
CONTROL = 60
assert max(TEXTS) < CONTROL < VOCAB - 1


class ToyTokenizer:
    """Greedy, up to what it has no token for."""

    vocab_size = CONTROL + 1
    longest = max(map(len, TEXTS.values()))

    def __init__(self) -> None:
        self.bos_token_id: int | None = None
        self.eos_token_ids: tuple[int, ...] = (END,)
        self.chat_templates: dict[str, str] = {}
        self.named_tokens: dict[str, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids, rest = [], text.encode()
        while fits := [token for token, piece in TEXTS.items() if rest.startswith(piece)]:
            token = max(fits, key=lambda t: len(TEXTS[t]))
            ids.append(token)
            rest = rest[len(TEXTS[token]) :]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return decode_bytes(self, ids, skip_special_tokens)

    def token_bytes(self, token: int, first: bool = False) -> bytes:
        return {END: b"<end>", CONTROL: b"<control>"}.get(token, TEXTS.get(token, b""))

    def is_special(self, token: int) -> bool:
        return token in (END, CONTROL)


def talking_engine(config: EngineConfig, **options: object) -> tuple[Engine, ToyRunner]:
    """The toy model with texts."""
    runner = ToyRunner(config, **options)  # pyright: ignore[reportArgumentType]
    model = replace(toy_model(runner.router, runner.max_model_len), tokenizer=ToyTokenizer())
    return Engine.with_runner(config, model, runner), runner  # pyright: ignore[reportArgumentType]
