"""A bfloat16 model: which parameters stay float32, that a step returns the dtypes and shapes it was given, and that its
rounding noise is no more than Hugging Face's own.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stepper import Stepper

from jhybrid.cache.router import Cache, Router
from jhybrid.models import abstract_params, family_for, read_config
from kernels_pallas.spans import make_spans

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
FLOAT32_LEAVES = ("['A_log']", "['D']", "['dt_bias']", "norm']['weight']", "router']['weight']", "['correction_bias']")
SLOTS, PAGES, TOKENS = 3, 5, 4
NOISE: dict[str, float] = json.loads((GOLDEN / "bfloat16.json").read_text())
"""Of Hugging Face's bfloat16, see make_bfloat16.py."""
QUICK = ("kimi_linear", "nemotron_h_dense")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["decode", "ragged"])
def test_bfloat16_step(name: str, kind: str):
    config = read_config(GOLDEN / name)
    module = family_for(config).module(config, jnp.dtype("bfloat16"))
    params = abstract_params(module)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        where = jax.tree_util.keystr(path)
        island = where.endswith(FLOAT32_LEAVES)
        assert leaf.dtype == (jnp.float32 if island else jnp.bfloat16), where

    parts = config.layer_parts(page_size=8, kv_dtype="bfloat16", state_dtype="float32", conv_dtype="bfloat16")
    router = Router(parts)
    rows = {"slot": SLOTS + 1, "page": PAGES + 1}
    arrays = {
        name: jax.ShapeDtypeStruct((layers * rows[part.unit], *part.shape), part.dtype)
        for name, (part, layers) in router.arrays.items()
    }
    spans = make_spans(
        [1, 1], [3, 0], [0, 1], [0, 1], [[0], [1]], num_tokens=TOKENS, num_seqs=TOKENS, scratch_slot=3, kind=kind
    )

    def step(params, cache, token_ids):
        hidden, cache = module.apply({"params": params}, token_ids, cache, spans)
        return hidden, module.apply({"params": params}, hidden, method="logits"), cache

    tokens = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    hidden, logits, cache = jax.eval_shape(step, params, Cache(router, arrays), tokens)
    assert (hidden.shape, hidden.dtype) == ((TOKENS, config.hidden_size), jnp.bfloat16)
    assert (logits.shape, logits.dtype) == ((TOKENS, config.vocab_size), jnp.float32)
    assert {n: (a.shape, a.dtype) for n, a in cache.arrays.items()} == {
        n: (a.shape, a.dtype) for n, a in arrays.items()
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_bfloat16_numbers(name: str):
    """Chunk by chunk, with caches of bfloat16, against the float32 numbers. Experts near a tie make jumps in both."""
    numbers, stepper = np.load(GOLDEN / name / "goldens.npz"), Stepper(GOLDEN / name, dtype="bfloat16")
    start, rows, prompt = 0, [], numbers["prompt"].tolist()
    for size in numbers["chunk_lengths"].tolist():
        rows.append(stepper.feed({0: prompt[start : start + size]})[0])
        start += size
    reference = numbers["full_logits"]
    noise = np.sqrt(np.mean((np.concatenate(rows) - reference) ** 2)) / reference.std()
    assert 0.001 < noise < 1.5 * NOISE[name], (noise, NOISE[name])
