"""Fingerprint: which model, and which layout of its caches, a cached prefix belongs to."""

import hashlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

import jhybrid
from jhybrid.config import EngineConfig
from jhybrid.executables import Executables
from jhybrid.mesh import shape_of

if TYPE_CHECKING:
    from jhybrid.weights.load import Model

GOLDEN = 0x9E3779B9


def fingerprint(config: EngineConfig, model: "Model", executables: Executables) -> bytes:
    """32 bytes that differ if the weights, the model's configuration, the caches' layout or this package's version do.

    The weights are hashed where they are, on the device: every parameter in one pass, position by position.
    """
    digest = hashlib.sha256()
    told = (jhybrid.__version__, jax.default_backend(), model.architecture, model.config, model.dtype, config.page_size)
    told += (config.snapshot_dtype, config.chunk_size, config.attention_impl, config.ssm_impl, config.moe_impl)
    for fact in (*told, sorted(model.router.arrays.items())):
        digest.update(repr(fact).encode() + b"\n")
    hashes = hashing(model.params, executables)(model.params)
    for path, value in jax.tree_util.tree_leaves_with_path(jax.device_get(hashes)):
        digest.update(jax.tree_util.keystr(path).encode() + value.tobytes() + b"\n")
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}\n".encode())
    return digest.digest()


def hashing(params: Any, executables: Executables) -> Any:
    """`hash_of_tree`, compiled for parameters of these shapes."""
    shapes = jax.tree.map(shape_of, params)
    structure = jax.tree.map(lambda _: 0, shapes)
    return executables.get("fingerprint", hash_of_tree, (shapes,), result=structure)


def hash_of_tree(tree: Any) -> Any:
    """`hash_of_array` of every leaf."""
    return jax.tree.map(hash_of_array, tree)


def hash_of_array(array: Array) -> Array:
    """[2] uint32: two sums over the bits of an array's elements, each mixed with its position."""
    size = array.dtype.itemsize
    words: Any = jax.lax.bitcast_convert_type(array, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size])
    words = words.reshape(-1).astype(jnp.uint32)
    at = jnp.arange(words.size, dtype=jnp.uint32)
    return jnp.stack([jnp.sum(_mix(words ^ (at * jnp.uint32(GOLDEN) + jnp.uint32(seed)))) for seed in (1, 0x51ED270B)])


def _mix(x: Array) -> Array:
    """The 32-bit finaliser of MurmurHash3 (Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
