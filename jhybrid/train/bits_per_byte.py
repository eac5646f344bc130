"""Bits per byte: how well a model predicts a text, in a unit that does not depend on its vocabulary."""

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tokenizers import Tokenizer

from jhybrid.cache.router import NoCache
from jhybrid.train.text import BOS_ID, encode
from kernels_pallas.spans import Spans, dense_spans


def token_losses(model: nn.Module, params: Mapping[str, Any], rows: Array, spans: Spans) -> Array:
    """[B, L] float32: minus the log-probability (nats) of each token of rows [B, L + 1] given those before it."""
    hidden, _ = model.apply({"params": params}, rows[:, :-1].reshape(-1), NoCache(), spans)  # [B * L, M]
    logits = model.apply({"params": params}, hidden, method="logits")  # [B * L, V]
    assert isinstance(logits, Array)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:].reshape(-1))
    return losses.reshape(rows.shape[0], -1)


class BitsPerByte:
    """The measurement over one text. Build it once; each call takes the parameters of the moment.

    The text is scored in windows of `<bos>` and `length` tokens. Each window but the first begins half a window
    before the tokens that it scores, so that every token but the very first ones has `length / 2` tokens of context.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, text: str, *, length: int, batch: int, limit: int | None = None
    ):
        """`limit` scores that many windows only, spread evenly over the text."""
        self._rows, self._scored = score_windows(encode(tokenizer, text), length)
        if limit is not None and limit < len(self._rows):
            chosen = np.linspace(0, len(self._rows) - 1, limit).astype(int)
            self._rows, self._scored = self._rows[chosen], self._scored[chosen]
        bytes_of = np.array([len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.get_vocab_size())])
        # A byte-level token is spelled with one character per byte; <bos> and <eos> never occur in a text.
        self.num_bytes = int(bytes_of[self._rows[:, 1:]][self._scored].sum())
        self._batch = batch
        spans = dense_spans(batch, length)
        self._losses = jax.jit(lambda params, rows: token_losses(model, params, rows, spans))

    def __call__(self, params: Mapping[str, Any]) -> float:
        """Bits per byte of the text under `params`."""
        nats = 0.0
        for at in range(0, len(self._rows), self._batch):
            rows, scored = self._rows[at : at + self._batch], self._scored[at : at + self._batch]
            padded = np.concatenate([rows, np.repeat(rows[:1], self._batch - len(rows), axis=0)])
            losses = np.asarray(self._losses(params, jnp.asarray(padded)))[: len(rows)]
            nats += float(losses[scored].sum(dtype=np.float64))
        return nats / math.log(2) / self.num_bytes


def bits_per_byte(
    params: Mapping[str, Any], model: nn.Module, tokenizer: Tokenizer, text: str, *, length: int = 512, batch: int = 8
) -> float:
    """Bits per byte of one text, measured once; see BitsPerByte."""
    return BitsPerByte(model, tokenizer, text, length=length, batch=batch)(params)


def score_windows(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [W, length + 1] int32 and, [W, length] bool, which of their targets count: each token exactly once."""
    if not len(tokens):
        raise ValueError("there is no text to score")
    rows, scored, end = [], [], 0
    while end < len(tokens):
        start = max(0, end - length // 2)
        window = tokens[start : start + length]
        row = np.full(length + 1, BOS_ID, np.int32)
        row[1 : 1 + len(window)] = window
        counts = np.zeros(length, bool)
        counts[end - start : len(window)] = True
        rows.append(row)
        scored.append(counts)
        end = start + len(window)
    return np.stack(rows), np.stack(scored)
