"""Trainer: runs a recipe to a native checkpoint. `jhybrid train` calls `train`.

A run's directory is a checkpoint that the engine loads (`config.json`, `params/`, `tokenizer.json`) from the first
save on; `state/` inside it holds what a resumed run needs and may be deleted afterwards.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array
from tokenizers import Tokenizer

from jhybrid.errors import JhybridError
from jhybrid.models import family_of, init_params
from jhybrid.train.bits_per_byte import BitsPerByte, token_losses
from jhybrid.train.checkpoints import last_step, restore_state, save_state
from jhybrid.train.optimizer import make_optimizer
from jhybrid.train.progress import BarProgress, JsonProgress
from jhybrid.train.recipe import Recipe, TrainConfig
from jhybrid.train.text import BOS, EOS, Windows, line_starts, read_corpus, token_stream, train_tokenizer
from jhybrid.weights.orbax import save_orbax
from kernels_pallas.spans import dense_spans

QUICK_WINDOWS = 32  # windows of the held-out measurement at each save; the final one scores the whole text


class TrainingError(JhybridError):
    """The loss is no longer a finite number; the last save is intact."""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    steps: int
    tokens: int  # seen in training
    heldout_bits_per_byte: float  # of the published bfloat16 weights, over the whole held-out text
    heldout_bytes: int
    tokens_per_second: float  # of this run's own steps, saves and measurements included
    output: str


@dataclass
class TrainState:
    """What a step changes."""

    step: int
    params: Any
    opt_state: Any


def train(config: TrainConfig) -> TrainResult:
    """Run the recipe. Raises ConfigError for a bad corpus, recipe or resume, TrainingError if the loss diverges."""
    recipe = Recipe.read(config.preset)
    if config.steps is not None:
        recipe = replace(recipe, steps=config.steps)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    progress = JsonProgress() if config.json else BarProgress(recipe.steps)
    with progress:
        return Trainer(recipe, config, output, progress).run()


class Trainer:
    """One run: the corpus and model of a recipe, and the loop over its steps."""

    def __init__(self, recipe: Recipe, config: TrainConfig, output: Path, progress: JsonProgress | BarProgress):
        self._recipe, self._config, self._output, self._progress = recipe, config, output, progress
        corpus = read_corpus(config.corpus, recipe.pattern, recipe.heldout)
        self._tokenizer = train_tokenizer([corpus.training[n] for n in sorted(corpus.training)], recipe.vocab_size)
        stream = token_stream(self._tokenizer, corpus.training)
        starts = line_starts(self._tokenizer, stream)
        self._windows = Windows(stream, starts, recipe.batch, recipe.length, recipe.seed)
        self._hf_config = dict(recipe.model) | {"vocab_size": recipe.vocab_size}
        family = family_of(self._hf_config)
        self._model = family.module(family.config.from_hf(self._hf_config), jnp.float32)
        sizes: dict[str, Any] = {"length": recipe.length, "batch": recipe.batch}
        self._quick = BitsPerByte(self._model, self._tokenizer, corpus.heldout_text, limit=QUICK_WINDOWS, **sizes)
        self._full = BitsPerByte(self._model, self._tokenizer, corpus.heldout_text, **sizes)
        self._optimizer = make_optimizer(recipe)
        self._step = make_step(self._model, self._optimizer, recipe.batch, recipe.length)
        progress.event("corpus", tokens=len(stream), tokens_per_epoch=self._windows.per_epoch * self._tokens_per_step)

    @property
    def _tokens_per_step(self) -> int:
        return self._recipe.batch * self._recipe.length

    def run(self) -> TrainResult:
        state = self._start()
        first, began = state.step, time.monotonic()
        while state.step < self._recipe.steps:
            rows = jnp.asarray(self._windows.batch(state.step))
            state.params, state.opt_state, loss = self._step(state.params, state.opt_state, rows)
            state.step += 1
            self._report(state.step, float(loss))
            if state.step % self._config.save_every == 0 and state.step < self._recipe.steps:
                self._save(state, self._quick(state.params), time.monotonic() - began)
        rate = (state.step - first) * self._tokens_per_step / (time.monotonic() - began)
        return self._finish(state, rate)

    def _start(self) -> TrainState:
        params = init_params(self._model, jax.random.key(self._recipe.seed))
        state = TrainState(0, params, jax.jit(self._optimizer.init)(params))
        step = last_step(self._output) if self._config.resume else None
        if step is not None:
            state.params, state.opt_state = restore_state(
                self._output, self._recipe, step, state.params, state.opt_state
            )
            state.step = step
        parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self._progress.event("start", parameters=parameters, step=state.step, steps=self._recipe.steps)
        return state

    def _report(self, step: int, loss: float) -> None:
        if not jnp.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {step}; lower learning_rate and resume from the last save")
        self._progress.step(step, loss)

    def _save(self, state: TrainState, heldout: float, seconds: float) -> None:
        save_state(self._output, self._recipe, state.step, state.params, state.opt_state)
        self._publish(state, heldout)
        self._progress.event("saved", step=state.step, heldout_bits_per_byte=heldout, seconds=seconds)

    def _finish(self, state: TrainState, rate: float) -> TrainResult:
        save_state(self._output, self._recipe, state.step, state.params, state.opt_state)
        rounded = jax.tree.map(lambda a: a.astype(jnp.float32), published_params(state.params))
        result = TrainResult(
            steps=state.step,
            tokens=state.step * self._tokens_per_step,
            heldout_bits_per_byte=self._full(rounded),
            heldout_bytes=self._full.num_bytes,
            tokens_per_second=rate,
            output=str(self._output),
        )
        self._publish(state, result.heldout_bits_per_byte)
        self._progress.event("finished", **asdict(result), heldout_bits_per_byte_float32=self._full(state.params))
        return result

    def _publish(self, state: TrainState, heldout: float) -> None:
        metadata = {
            "steps": state.step,
            "tokens": state.step * self._tokens_per_step,
            "heldout_bits_per_byte": round(heldout, 4),
            "recipe": asdict(self._recipe),
        }
        save_orbax(
            self._output, {**self._hf_config, **self._recipe.published}, published_params(state.params), metadata
        )
        save_tokenizer(self._tokenizer, self._output, self._hf_config["max_position_embeddings"])


def make_step(
    model: nn.Module, optimizer: optax.GradientTransformation, batch: int, length: int
) -> Callable[[Any, Any, Array], tuple[Any, Any, Array]]:
    """The compiled step: (params, opt_state, rows [B, L + 1]) -> (params, opt_state, loss); both states are donated."""
    spans = dense_spans(batch, length)

    def mean_loss(params: Mapping[str, Any], rows: Array) -> Array:
        return token_losses(model, params, rows, spans).mean()

    def step(params: Any, opt_state: Any, rows: Array) -> tuple[Any, Any, Array]:
        loss, gradient = jax.value_and_grad(mean_loss)(params, rows)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def published_params(params: Any) -> Any:
    """Matrices in bfloat16; vectors, which hold decays and step sizes and weigh nothing, stay float32."""
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim > 1 else a, params)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that Hugging Face tokenizers read beside it."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
