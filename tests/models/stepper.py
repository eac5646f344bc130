"""Stepper: drives a family's module step by step through a real cache, by hand, with every unowned row NaN."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jhybrid.cache.arrays import abstract_cache
from jhybrid.cache.router import Cache, NoCache, Router
from jhybrid.mesh import using
from jhybrid.models import abstract_params, family_for, layouts_of, read_config
from jhybrid.weights.load import shared_out
from jhybrid.weights.safetensors import load_safetensors
from kernels_pallas.spans import Kind, Spans, dense_spans, make_spans

PAGE = 8
SLOTS = 9
PAGES = 80
SEQS = 8
TOKENS = 128
CHUNK = 16
WIDTH = 16
QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all the time that these tests take


class Stepper:
    """One model and its cache. `feed` runs a step; sequences are named by small integers and keep their lengths."""

    def __init__(self, directory: Path, mesh: Mesh | None = None, dtype: str = "float32"):
        self.config, self.mesh = read_config(directory), mesh
        family = family_for(self.config)
        self.module = family.module(self.config, jnp.dtype(dtype))
        ignored = [r"lm_head\.weight"] if self.config.tie_word_embeddings else []
        names = family.weight_names(self.config)
        dtypes = {"kv_dtype": dtype, "state_dtype": "float32", "conv_dtype": dtype}
        with using(mesh):
            self.router = Router(self.config.layer_parts(page_size=PAGE, **dtypes))
            layouts = layouts_of(self.module)
        shapes = shared_out(abstract_params(self.module), layouts, mesh)
        self.params = load_safetensors(directory, shapes, names, ignored=ignored, layouts=layouts)
        self._run = jax.jit(self._step, compiler_options=QUICK)
        self._poison = jax.jit(self._poisoned)
        self.reset()

    def reset(self) -> None:
        """Forget all sequences; the whole cache becomes NaN."""
        shapes = abstract_cache(self.router, slots=SLOTS, pages=PAGES, mesh=self.mesh)
        nan = {name: np.full(shape.shape, np.nan, shape.dtype) for name, shape in shapes.arrays.items()}
        arrays = {name: jax.device_put(array, shapes.arrays[name].sharding) for name, array in nan.items()}
        self.cache = Cache(self.router, arrays)
        self.lengths: dict[int, int] = {}

    def feed(self, tokens: dict[int, list[int]], kind: Kind = "ragged", params=None) -> dict[int, np.ndarray]:
        """Append tokens to sequences in one step. Returns the logits [tokens, V] of each."""
        spans = self._spans(tokens, kind)
        for seq, ids in tokens.items():
            self.lengths[seq] = self.lengths.get(seq, 0) + len(ids)
        flat = [token for ids in tokens.values() for token in ids]
        padded = np.zeros(TOKENS if kind == "ragged" else SEQS, np.int32)
        padded[: len(flat)] = flat
        with using(self.mesh):
            logits, cache = self._run(self.params if params is None else params, self.cache, padded, spans)
        self.cache = self._poison(cache, self._owned("slot"), self._owned("page"))
        ends = np.cumsum([len(ids) for ids in tokens.values()])
        rows = np.split(np.asarray(logits)[: len(flat)], ends[:-1])
        return dict(zip(tokens, rows, strict=True))

    def dense(self, ids: list[list[int]]) -> np.ndarray:
        """Logits [S, L, V] of whole sequences of one length, with no cache."""
        spans = dense_spans(len(ids), len(ids[0]))

        def step(params, tokens, spans):
            return self._step(params, NoCache(), tokens, spans)[0]

        run = jax.jit(step, compiler_options=QUICK)
        logits = run(self.params, np.array(ids, np.int32).reshape(-1), spans)
        return np.asarray(logits).reshape(len(ids), len(ids[0]), -1)

    def _step(self, params, cache, token_ids, spans: Spans):
        hidden, cache = self.module.apply({"params": params}, token_ids, cache, spans)
        return self.module.apply({"params": params}, hidden, method="logits"), cache

    def _spans(self, tokens: dict[int, list[int]], kind: Kind) -> Spans:
        slots = [_slot(seq) for seq in tokens]
        return make_spans(
            [len(ids) for ids in tokens.values()],
            [self.lengths.get(seq, 0) for seq in tokens],
            slots,
            slots,
            [_pages(seq, self.lengths.get(seq, 0) + len(ids)) for seq, ids in tokens.items()],
            num_tokens=TOKENS if kind == "ragged" else SEQS,
            num_seqs=SEQS,
            scratch_slot=SLOTS,
            scratch_page=PAGES,
            table_width=WIDTH,
            kind=kind,
            chunk_size=CHUNK,
        )

    def _owned(self, unit: str) -> np.ndarray:
        owned = np.zeros((SLOTS if unit == "slot" else PAGES) + 1, bool)
        for seq, length in self.lengths.items():
            owned[[_slot(seq)] if unit == "slot" else _pages(seq, length)] = True
        return owned

    def _poisoned(self, cache: Cache, slots, pages) -> Cache:
        """Every row that no sequence owns, the scratch row among them, NaN again."""
        arrays = {}
        for name, (part, layers) in self.router.arrays.items():
            owned = jnp.tile(slots if part.unit == "slot" else pages, layers)
            owned = owned.reshape(-1, *[1] * len(part.shape))
            arrays[name] = jnp.where(owned, cache.arrays[name], jnp.nan)
        return Cache(self.router, arrays)


def _slot(seq: int) -> int:
    """Slots out of order, so that a slot taken for a sequence's index shows."""
    return SLOTS - 1 - seq


def _pages(seq: int, length: int) -> list[int]:
    """Pages of a sequence interleaved with those of others, in descending order."""
    return [PAGES - 1 - seq - SEQS * i for i in range(-(-length // PAGE))] if seq else list(_first_pages(length))


def _first_pages(length: int):
    """Sequence 0 may be long: it has pages of its own at the bottom."""
    return range(-(-length // PAGE))
