"""The toy engine with a tokenizer, so that texts can be scored against the toy's own table by hand."""

from collections.abc import Iterable
from dataclasses import replace

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from tests.toy_model import ToyRunner, hash_of, logprob_of, next_token, toy_model

BOS, EOS = 4, 5
LETTERS = " abcdefghijklmnopqrstuvwxyz.\n"


class LetterTokenizer:
    """A token for each letter, after the special ones."""

    vocab_size = 64
    bos_token_id: int | None = BOS
    eos_token_ids = (EOS,)
    longest = len("<bos>")
    named_tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}  # noqa: RUF012

    def __init__(self, add_bos: bool = False, chat_template: str | None = None):
        self.add_bos = add_bos
        self.chat_templates = {} if chat_template is None else {"default": chat_template}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [8 + LETTERS.index(letter) for letter in text]
        return [BOS, *ids] if add_special_tokens and self.add_bos else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.token_bytes(token).decode() for token in ids)

    def token_bytes(self, token: int, first: bool = False) -> bytes:
        return LETTERS[token - 8].encode() if 8 <= token < 8 + len(LETTERS) else b""

    def is_special(self, token: int) -> bool:
        return token < 8


def text_engine(
    tokenizer: LetterTokenizer | None = None, caching: bool = True, kind: str = "hybrid"
) -> tuple[Engine, ToyRunner]:
    """A toy engine of at most 64 tokens that reads letters."""
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        page_size=4,
        num_pages=96,
        chunk_size=4,
        enable_prefix_caching=caching,
        snapshot_slots=16 if caching else None,
        compilation_cache_dir="",
    )
    runner = ToyRunner(config, kind=kind)
    model = replace(toy_model(runner.router, runner.max_model_len), tokenizer=tokenizer or LetterTokenizer())
    return Engine.with_runner(config, model, runner), runner


def by_hand(tokens: list[int], start: int) -> tuple[float, bool]:
    """Log-probability of tokens[start:] from the toy's table, and whether each is what the toy would say."""
    total, is_greedy = 0.0, True
    for at in range(start, len(tokens)):
        history = hash_of(tokens[:at])
        total += logprob_of(history, tokens[at])
        is_greedy &= tokens[at] == next_token(history, temperature=0, seed=0, step=0, banned=frozenset())
    return total, is_greedy
