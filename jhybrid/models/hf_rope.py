"""Rotary positions as a Hugging Face config gives them: `rope_parameters` (5.x), or `rope_theta` and `rope_scaling`."""

import math
from typing import Any

from jhybrid.errors import ConfigError
from jhybrid.layers.rope import (
    Rope,
    llama3_frequencies,
    plain_frequencies,
    proportional_frequencies,
    yarn_frequencies,
)
from jhybrid.models.hf_config import HfConfig

SHARE = "partial_rotary_factor"


def read_rope(
    hf: HfConfig,
    head_dim: int,
    *,
    partial: float | None = None,
    default_theta: float | None = None,
    layer_type: str | None = None,
    layer_types: tuple[str, ...] = (),
) -> Rope:
    """The frequencies and magnitude of a head of `head_dim`.

    `partial` is the rotated share of a head of families whose configs do not say it at the top level, `layer_type`
    the section that counts in those with one for each of `layer_types`.
    """
    nested = rope_section(hf, layer_type, layer_types)
    theta = _holder(hf, nested, "rope_theta", layer_type).number("rope_theta", default=default_theta, above=1.0)
    if partial is None or nested.has(SHARE):
        partial = _holder(hf, nested, SHARE, layer_type).number(SHARE, default=1.0, above=0.0, most=1.0)
    plain = plain_frequencies(theta, int(head_dim * partial))
    kind = nested.text("rope_type", "type", default="default")
    if not 0 < 2 * len(plain) <= head_dim or (kind == "proportional" and head_dim % 2):
        raise ConfigError(
            "head_dim", f"{head_dim}, of which rotary positions turn a share of {partial}: pairs do not make it up"
        )
    if kind == "default":
        return Rope(_floats(plain))
    if kind == "linear":
        return Rope(_floats(plain / nested.number("factor", above=0.0)))
    if kind == "proportional":
        turned = proportional_frequencies(theta, head_dim, partial)
        return Rope(_floats(turned / nested.number("factor", default=1.0, above=0.0)))
    if kind == "llama3":
        factor, low = nested.number("factor", above=0.0), nested.number("low_freq_factor", above=0.0)
        bands = low, nested.number("high_freq_factor", above=low)
        original = nested.integer("original_max_position_embeddings")
        return Rope(_floats(llama3_frequencies(plain, factor, *bands, original)))
    if kind == "yarn":
        return _yarn(hf, nested, plain, theta)
    raise ConfigError(
        nested.named("rope_type"),
        f"{kind!r} is not implemented; supported: default, linear, proportional, llama3, yarn",
    )


def has_positions(hf: HfConfig) -> bool:
    """Whether a config of a family that may have no positions gives a `rope_theta`; null, or nothing at all: none.

    Raises ConfigError where the rest of the keys asks for positions all the same.
    """
    nested = rope_section(hf)
    if nested.has("rope_theta") or hf.has("rope_theta"):
        return True
    said = [key for key in nested.raw if nested.has(key)]
    null = "rope_theta" in nested.raw or "rope_theta" in hf.raw
    if said and not (null and said == ["rope_type"] and nested.raw["rope_type"] == "default"):
        raise ConfigError(
            nested.named(said[0]), "is there without a rope_theta; give one, or take this away for no positions"
        )
    return False


def rope_section(hf: HfConfig, layer_type: str | None = None, layer_types: tuple[str, ...] = ()) -> HfConfig:
    """The section that counts. As in transformers that is `rope_scaling` where there is one; the other must agree."""
    blocks = {key: hf.section(key) for key in ("rope_scaling", "rope_parameters")}
    for block in blocks.values():
        for key, value in block.raw.items():
            if isinstance(value, dict) and key not in layer_types:
                raise ConfigError(block.named(key), "an object is not understood here; give rope_theta and the like")
    found = {key: block if layer_type is None else block.section(layer_type) for key, block in blocks.items()}
    if not blocks["rope_scaling"].raw:
        return found["rope_parameters"]
    if blocks["rope_parameters"].raw:
        said = [_said(hf, block) for block in found.values()]
        for key in said[0] | said[1]:
            if said[0].get(key) != said[1].get(key):
                scaling, parameters = (of.get(key, "absent") for of in said)
                raise ConfigError(
                    found["rope_scaling"].named(key),
                    f"{scaling!r} contradicts {found['rope_parameters'].named(key)}: {parameters!r}; keep one of the "
                    "two objects",
                )
    return found["rope_scaling"]


def _said(hf: HfConfig, block: HfConfig) -> dict[str, Any]:
    """All that a section says, with what the top level says where it does not."""
    outer = {key: hf.raw[key] for key in ("rope_theta", SHARE) if hf.has(key)}
    own = {key: value for key, value in block.raw.items() if value is not None}
    return {"rope_type": own.pop("type", "default")} | outer | own


def _holder(hf: HfConfig, nested: HfConfig, key: str, layer_type: str | None) -> HfConfig:
    """Where a key is that stands in the section or else at the top level."""
    return nested if layer_type is not None or nested.has(key) else hf


def _yarn(hf: HfConfig, nested: HfConfig, plain: Any, theta: float) -> Rope:
    for key in ("mscale", "mscale_all_dim", "truncate"):
        if nested.has(key):
            raise ConfigError(nested.named(key), f"{nested.raw[key]!r} is not implemented for yarn")
    factor, slow = nested.number("factor", above=0.0), nested.number("beta_slow", default=1.0, above=0.0)
    fast = nested.number("beta_fast", default=32.0, least=slow)
    length = hf.integer("max_position_embeddings")
    original = nested.integer("original_max_position_embeddings", default=length)
    frequencies = yarn_frequencies(plain, theta, factor, fast, slow, original)
    magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(_floats(frequencies), nested.number("attention_factor", default=magnitude, above=0.0))


def _floats(frequencies: Any) -> tuple[float, ...]:
    return tuple(float(f) for f in frequencies)
