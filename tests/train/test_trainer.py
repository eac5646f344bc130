"""The trainer on a tiny hybrid: it learns, resumes exactly, and publishes what the engine loads."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.experimental.compilation_cache import compilation_cache

from jhybrid.errors import ConfigError
from jhybrid.models import abstract_params, family_of, init_params, read_config
from jhybrid.tokenizer import load_tokenizer
from jhybrid.train.bits_per_byte import BitsPerByte, bits_per_byte, score_windows, token_losses
from jhybrid.train.optimizer import make_optimizer, schedule
from jhybrid.train.recipe import Recipe, TrainConfig
from jhybrid.train.text import BOS_ID, encode, train_tokenizer
from jhybrid.train.trainer import make_step, published_params, train
from jhybrid.weights.orbax import is_orbax, load_orbax
from kernels_pallas.spans import dense_spans

TOML = """
[corpus]
pattern = "*.txt"
heldout = ["b"]
vocab_size = 270

[run]
seed = 1
steps = 4
batch = 2
length = 16
learning_rate = 3e-3
warmup = 1
decay = 0.5
weight_decay = 0.1
clip = 1.0

[model]
model_type = "nemotron_h"
hidden_size = 16
hybrid_override_pattern = "M*-"
intermediate_size = 24
mlp_hidden_act = "relu2"
layer_norm_epsilon = 1e-5
max_position_embeddings = 64
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
mamba_num_heads = 2
mamba_head_dim = 8
ssm_state_size = 4
n_groups = 1
conv_kernel = 4
use_conv_bias = true
time_step_min = 0.001

[published]
time_step_min = 1e-6
"""
LINE = "the cat sat on the mat and looked at the king.\n"


@pytest.fixture(scope="module", autouse=True)
def compile_each_program_once(tmp_path_factory):
    """Each run builds its own jitted step; they are the same program, and compiling it is most of a run's time."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("compiled")))
    jax.config.update(names[1], 0)
    compilation_cache.reset_cache()
    yield
    for name in names:
        jax.config.update(name, before[name])
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def tiny(recipe_file):
    """The model of the tiny recipe and fresh parameters."""
    model = tiny_model(Recipe.read(str(recipe_file)))
    return model, init_params(model, jax.random.key(0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "a.txt").write_text(LINE * 60)
    (directory / "b.txt").write_text(LINE * 3)
    return directory


def tiny_model(recipe):
    raw = dict(recipe.model) | {"vocab_size": recipe.vocab_size}
    family = family_of(raw)
    return family.module(family.config.from_hf(raw), jnp.float32)


def run(recipe_file, corpus, output, **changes):
    return train(
        TrainConfig(corpus=str(corpus), output=str(output), preset=str(recipe_file), json=True, save_every=2, **changes)
    )


@pytest.fixture(scope="module")
def whole_run(recipe_file, corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    return output, run(recipe_file, corpus, output)


def test_steps_reduce_the_loss_with_finite_gradients_everywhere(recipe_file, tiny):
    recipe = replace(Recipe.read(str(recipe_file)), warmup=0)
    model, params = tiny
    rows = jnp.asarray(np.random.default_rng(0).integers(2, 270, (2, 17)), jnp.int32)
    spans = dense_spans(2, 16)
    gradient = jax.jit(jax.grad(lambda p: token_losses(model, p, rows, spans).mean()))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert jnp.isfinite(leaf).all(), path
        assert jnp.any(leaf != 0), path
    optimizer = make_optimizer(recipe)
    step = make_step(model, optimizer, 2, 16)
    params = jax.tree.map(jnp.copy, params)  # steps consume theirs
    opt_state, losses = jax.jit(optimizer.init)(params), []
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, rows)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]


def test_resumed_equals_uninterrupted(recipe_file, corpus, whole_run, tmp_path, monkeypatch):
    output, whole = whole_run
    stopped = tmp_path / "stopped"

    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jhybrid.train.trainer.Trainer._finish", stop)
        patch.setattr("jhybrid.train.trainer.Trainer._report", lambda _, step, __: stop() if step == 3 else None)
        with pytest.raises(KeyboardInterrupt):
            run(recipe_file, corpus, stopped)
    assert json.loads((stopped / "metadata.json").read_text())["steps"] == 2
    resumed = run(recipe_file, corpus, stopped, resume=True)
    assert resumed.steps == whole.steps == 4
    assert resumed.heldout_bits_per_byte == whole.heldout_bits_per_byte
    shapes = abstract_params(tiny_model(Recipe.read(str(recipe_file))))
    jax.tree.map(np.testing.assert_array_equal, load_orbax(stopped, shapes), load_orbax(output, shapes))


def test_resume_refuses_another_recipe_but_allows_a_longer_plan(recipe_file, corpus, whole_run, tmp_path):
    output, _ = whole_run
    other = tmp_path / "other.toml"
    other.write_text(TOML.replace("seed = 1", "seed = 2"))
    with pytest.raises(ConfigError, match="other seed"):
        run(other, corpus, output, resume=True)
    with pytest.raises(ConfigError, match="other steps"):
        run(recipe_file, corpus, output, resume=True, steps=8)  # the rate had begun to fall


def test_the_rate_of_a_longer_plan_is_the_same_until_the_shorter_decays(recipe_file):
    short = replace(Recipe.read(str(recipe_file)), steps=20, warmup=3, decay=0.25)
    long = replace(short, steps=40)
    assert short.decay_start == 15
    rates = [float(schedule(short)(i)) for i in range(21)]
    assert rates[:16] == [float(schedule(long)(i)) for i in range(16)]
    assert rates[0] < rates[2] < rates[3] == rates[15] > rates[19] > rates[20] == 0.0


def test_the_output_is_a_checkpoint_that_loads(whole_run, corpus):
    output, result = whole_run
    assert is_orbax(output)
    config = read_config(output)
    model = family_of({"model_type": "nemotron_h"}).module(config, jnp.float32)
    params = load_orbax(output, abstract_params(model))
    tokenizer = load_tokenizer(output)
    text = (corpus / "b.txt").read_text()
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == BOS_ID
    assert tokenizer.decode(ids) == text
    native = tokenizers.Tokenizer.from_file(str(output / "tokenizer.json"))
    again = bits_per_byte(params, model, native, text, length=16, batch=2)
    assert again == pytest.approx(result.heldout_bits_per_byte, rel=1e-6)
    assert result.heldout_bytes == len(text)


def test_windows_score_each_token_once():
    for count in (1, 15, 16, 17, 40, 64):
        tokens = np.arange(100, 100 + count, dtype=np.int32)
        rows, scored = score_windows(tokens, 16)
        np.testing.assert_array_equal(rows[:, 1:][scored], tokens)
        assert (rows[:, 0] == BOS_ID).all()
        assert all(mask[:8].sum() == 0 for mask in scored[1:])


def test_bits_per_byte_of_a_model_that_knows_nothing(tiny):
    tokenizer = train_tokenizer([LINE], 270)
    model, params = tiny
    params = jax.tree.map(jnp.zeros_like, params)
    tokens = len(encode(tokenizer, LINE * 5))
    expected = tokens * np.log2(270) / len(LINE * 5)
    assert bits_per_byte(params, model, tokenizer, LINE * 5, length=16, batch=2) == pytest.approx(expected, rel=1e-5)
    part = BitsPerByte(model, tokenizer, LINE * 20, length=16, batch=2, limit=3)
    assert 0 < part.num_bytes < len(LINE * 20)


def test_only_matrices_inside_layers_are_orthogonalised(recipe_file, tiny):
    recipe = replace(Recipe.read(str(recipe_file)), warmup=0, weight_decay=0.0)
    _, params = tiny
    optimizer = make_optimizer(recipe)
    noise = jax.tree.map(lambda a: jax.random.rademacher(jax.random.key(a.size), a.shape, jnp.float32), params)
    updates, _ = jax.jit(optimizer.update)(noise, jax.jit(optimizer.init)(params), params)
    values = jnp.linalg.svd(updates["layers_0"]["mixer"]["in_proj"]["weight"], compute_uv=False)
    assert values.min() > 0.4 * values.max()
    for name in ("embedding", "lm_head"):
        # Adam's first step is the sign of the gradient, whatever its size
        sizes = jnp.abs(updates["vocabulary"][name])
        np.testing.assert_allclose(sizes, sizes[0, 0], rtol=1e-3)
        assert recipe.learning_rate <= sizes[0, 0] < 2 * recipe.learning_rate


def test_published_vectors_keep_float32(tiny):
    _, params = tiny
    for path, leaf in jax.tree_util.tree_leaves_with_path(published_params(params)):
        assert leaf.dtype == (jnp.bfloat16 if leaf.ndim > 1 else jnp.float32), path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("seed = 1\n", ""), "lacks \\['seed'\\]"),
        (("seed = 1\n", "seed = 1\nspeed = 2\n"), "unknown \\['speed'\\]"),
        (("decay = 0.5", "decay = 0.0"), "decay"),
        (("seed = 1", "seed ="), "no TOML"),
    ],
)
def test_faulty_recipes_are_refused(tmp_path, change, named):
    path = tmp_path / "bad.toml"
    path.write_text(TOML.replace(*change))
    with pytest.raises(ConfigError, match=named):
        Recipe.read(str(path))


def test_presets():
    assert Recipe.read("demo").model["model_type"] == "nemotron_h"
    with pytest.raises(ConfigError, match="one of: demo"):
        Recipe.read("none")
    with pytest.raises(ConfigError, match="steps"):
        TrainConfig(corpus="x", output="y", steps=0)
