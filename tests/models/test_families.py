"""Every family against Hugging Face's numbers, through every kind of step, with all unowned cache rows NaN."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stepper import QUICK, Stepper

from jhybrid.cache.router import NoCache
from jhybrid.models import FAMILIES, family_for
from kernels_pallas.spans import dense_spans

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/goldens.npz"))
VARIANTS = ("falcon_h1_norm", "lfm2", "lfm3_plain", "qwen3_5", "zamba2_rope")  # shown by others; in the long run only
ATOL = 1e-4


class Golden:
    """A tiny checkpoint of Hugging Face's and its numbers, with a stepper that runs ours."""

    def __init__(self, name: str):
        self.stepper = Stepper(GOLDEN / name)
        self.numbers = dict(np.load(GOLDEN / name / "goldens.npz"))
        self.prompt: list[int] = self.numbers["prompt"].tolist()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in NAMES],
)
def loaded(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture
def golden(loaded: Golden) -> Golden:
    loaded.stepper.reset()
    return loaded


def near(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ATOL)


def test_there_are_goldens_of_every_family():
    found = {json.loads((GOLDEN / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert found == {family.model_type for family in FAMILIES.values()}


def test_whole_prompt_in_one_step(golden: Golden):
    [logits] = golden.stepper.feed({0: golden.prompt}).values()
    near(logits, golden.numbers["full_logits"])


def test_changed_first_token_reaches_the_last(golden: Golden):
    """The positive control: a lost or mixed-up state could not pass both this and the unchanged prompt."""
    changed = [golden.prompt[0] ^ 1, *golden.prompt[1:]]
    [logits] = golden.stepper.feed({0: changed}).values()
    near(logits[-1], golden.numbers["changed_logits"])
    assert np.abs(logits[-1] - golden.numbers["full_logits"][-1]).max() > 50 * ATOL


@pytest.mark.parametrize(
    "loaded", ["nemotron_h_moe", "granite_rope", "qwen3", "lfm2_moe", "falcon_h1_norm", "qwen3_next"], indirect=True
)
def test_dense_without_cache(golden: Golden):
    changed = [golden.prompt[0] ^ 1, *golden.prompt[1:]]
    logits = golden.stepper.dense([golden.prompt, changed])
    near(logits[0], golden.numbers["full_logits"])
    near(logits[1, -1], golden.numbers["changed_logits"])


@pytest.mark.parametrize(
    "loaded", ["nemotron_h_dense", "granite_dense", "bamba", "mamba2", "falcon_h1", "zamba2"], indirect=True
)
def test_limited_time_steps(golden: Golden):
    """A `time_step_limit` that binds on both sides."""
    config = golden.stepper.config
    limit = tuple(float(bound) for bound in golden.numbers["time_step_limit"])
    limited = replace(config, mamba=replace(config.mamba, dt_limit=limit))
    module = family_for(limited).module(limited, jnp.dtype("float32"))
    variables = {"params": golden.stepper.params}

    def run(ids: jax.Array) -> jax.Array:
        hidden, _ = module.apply(variables, ids, NoCache(), dense_spans(1, len(golden.prompt)))
        return module.apply(variables, hidden[-1:], method="logits")

    logits = jax.jit(run, compiler_options=QUICK)(np.array(golden.prompt, np.int32))
    near(logits[0], golden.numbers["limited_logits"])
    assert np.abs(logits[0] - golden.numbers["full_logits"][-1]).max() > 50 * ATOL


def test_prefill_then_greedy_decode(golden: Golden):
    [logits] = golden.stepper.feed({0: golden.prompt}).values()
    rows, ids = [logits[-1]], [int(logits[-1].argmax())]
    for _ in range(len(golden.numbers["decode_ids"]) - 1):
        [logits] = golden.stepper.feed({0: ids[-1:]}, kind="decode").values()
        rows.append(logits[-1])
        ids.append(int(logits[-1].argmax()))
    assert ids == golden.numbers["decode_ids"].tolist()
    near(np.stack(rows), golden.numbers["decode_logits"])


@pytest.mark.parametrize("sizes", [(3, 7, 1, 1, 33, 2, 17, 5, 28), None], ids=["tiny", "golden"])
def test_odd_chunks(golden: Golden, sizes: tuple[int, ...] | None):
    start, rows = 0, []
    for size in sizes or golden.numbers["chunk_lengths"].tolist():
        rows += golden.stepper.feed({0: golden.prompt[start : start + size]}).values()
        start += size
    near(np.concatenate(rows), golden.numbers["full_logits"][:start])
    assert start == len(golden.prompt)
    if sizes is None:
        near(np.stack([r[-1] for r in rows]), golden.numbers["chunk_logits"])


def batch(golden: Golden) -> list[list[int]]:
    lengths = golden.numbers["batch_lengths"].tolist()
    return [row[:n].tolist() for row, n in zip(golden.numbers["batch_prompts"], lengths, strict=True)]


def test_batch_of_unequal_lengths(golden: Golden):
    """Prefilled in one step, then decoded together; sequence numbers are not their places in the batch."""
    prompts = dict(zip((2, 0, 5, 1, 4), batch(golden), strict=True))
    last = {seq: rows[-1] for seq, rows in golden.stepper.feed(prompts).items()}
    theirs = dict(zip(prompts, golden.numbers["batch_logits"], strict=True))
    ids = dict(zip(prompts, golden.numbers["batch_ids"].tolist(), strict=True))
    for step in range(len(theirs[0])):
        for seq in prompts:
            near(last[seq], theirs[seq][step])
        kind = "ragged" if step == 3 else "decode"
        last = {seq: rows[-1] for seq, rows in golden.stepper.feed({s: [ids[s][step]] for s in prompts}, kind).items()}


def test_sequences_that_join_one_by_one(golden: Golden):
    """Each step prefills a new sequence while the earlier ones decode, all packed in one step."""
    prompts = batch(golden)
    ids, theirs = golden.numbers["batch_ids"].tolist(), golden.numbers["batch_logits"]
    for step in range(len(prompts)):
        running = {seq: [ids[seq][step - 1 - seq]] for seq in range(step)}
        rows = golden.stepper.feed({**running, step: prompts[step]})
        for seq in range(step + 1):
            near(rows[seq][-1], theirs[seq][step - seq])


def test_nan_in_padding_tokens_stays_there(golden: Golden):
    """Padding has token id 0; with that embedding NaN, no number of a valid token may change."""
    params = golden.stepper.params
    table = params["vocabulary"]["embedding"].at[0].set(jnp.nan)
    poisoned = {**params, "vocabulary": {**params["vocabulary"], "embedding": table}}
    [logits] = golden.stepper.feed({0: golden.prompt}, params=poisoned).values()
    near(logits[:, 1:], golden.numbers["full_logits"][:, 1:])
    token = [int(golden.numbers["decode_ids"][0])]
    assert token != [0]
    [logits] = golden.stepper.feed({0: token}, kind="decode", params=poisoned).values()
    near(logits[-1, 1:], golden.numbers["decode_logits"][1, 1:])


@pytest.mark.parametrize("loaded", ["nemotron_h_latent", "kimi_linear"], indirect=True)
def test_gradients_reach_every_parameter(golden: Golden):
    """Dense steps train: finite gradients, none zero but that of the bias that only sways the choice of experts."""
    stepper = golden.stepper
    ids, targets = np.array(golden.prompt[:32], np.int32), np.array(golden.prompt[1:33])

    def loss(params):
        hidden, _ = stepper.module.apply({"params": params}, ids, NoCache(), dense_spans(2, 16))
        logits = stepper.module.apply({"params": params}, hidden, method="logits")
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1).mean()

    for path, gradient in jax.tree_util.tree_leaves_with_path(
        jax.jit(jax.grad(loss), compiler_options=QUICK)(stepper.params)
    ):
        where = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), where
        assert ("correction_bias" in where) == (np.abs(gradient).max() == 0), where
