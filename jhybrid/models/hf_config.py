"""HfConfig: strict reading of a Hugging Face config.json. Families read their keys through it, and nowhere else.

A key that is needed and missing, or of the wrong type, raises ConfigError with the key's name; a default is used
only where the caller states one, which must be the published one of that family.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jhybrid.errors import ConfigError
from jhybrid.layers.mlp import ACTIVATIONS
from jhybrid.layers.rope import (
    Rope,
    llama3_frequencies,
    plain_frequencies,
    proportional_frequencies,
    yarn_frequencies,
)

# Spellings before and after transformers 5.2.
LAYER_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "sliding_attention": "sliding",
    "conv": "conv",
    "hybrid": "hybrid",
    "mlp": "mlp",
    "moe": "moe",
}


class HfConfig:
    """One JSON object of a config, with typed look-ups. `where` prefixes the key in messages."""

    def __init__(self, raw: Mapping[str, Any], where: str = ""):
        self.raw = {key: _decoded(value) for key, value in raw.items()}
        self._where = where

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return self.raw.get(key) is not None

    def integer(
        self, key: str, *aliases: str, default: int | None = None, least: int = 1, most: int | None = None
    ) -> int:
        value = self._find(int, "an integer", key, aliases, default)
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ConfigError(self._where + key, f"must be {bounds}, got {value}")
        return value

    def multiple(self, key: str, *aliases: str, of: tuple[str, int]) -> int:
        """An integer that another key's value must divide."""
        value = self.integer(key, *aliases)
        if value % of[1]:
            raise ConfigError(self._where + key, f"{value} is not a multiple of {of[0]}={of[1]}")
        return value

    def number(self, key: str, *aliases: str, default: float | None = None) -> float:
        return float(self._find((int, float), "a number", key, aliases, default))

    def flag(self, key: str, *aliases: str, default: bool | None = None) -> bool:
        value = self._find(object, "true or false", key, aliases, default)
        if not isinstance(value, bool):
            raise ConfigError(self._where + key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str, *aliases: str, default: str | None = None) -> str:
        return self._find(str, "a string", key, aliases, default)

    def items(self, key: str, *aliases: str, default: list | None = None) -> list:
        return list(self._find((list, tuple), "a list", key, aliases, default))

    def section(self, key: str) -> "HfConfig":
        """A nested object, empty where absent."""
        return HfConfig(self._find(dict, "an object", key, (), {}), f"{self._where}{key}.")

    def one_of(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The value of a key of which only some values are implemented; null or absent means `default`."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None and None not in allowed:
            raise self._lacks(key)
        if value not in allowed:
            listed = ", ".join(repr(a) for a in allowed)
            raise ConfigError(self._where + key, f"{value!r} is not implemented for this family; supported: {listed}")
        return value

    def activation(self, key: str, default: str | None = None) -> str:
        name = self.text(key, default=default)
        if name not in ACTIVATIONS:
            raise ConfigError(self._where + key, f"{name!r} is not implemented; supported: {', '.join(ACTIVATIONS)}")
        return name

    def dt_limit(self, *keys: str) -> tuple[float, float]:
        """The clamp of Mamba2's step size; (0, inf), which is no clamp, where absent."""
        pair = self.items(*keys, default=[0.0, float("inf")])
        if len(pair) != 2 or not all(isinstance(x, int | float) for x in pair) or not 0 <= pair[0] <= pair[1]:
            raise ConfigError(self._where + keys[0], f"must be [low, high] with 0 <= low <= high, got {pair!r}")
        return float(pair[0]), float(pair[1])

    def layer_kinds(self, key: str, *aliases: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """A list of layer types in either spelling, as our names; an unknown one is refused with its position."""
        found = self.items(key, *aliases)
        used = next(k for k in (key, *aliases) if self.has(k))
        kinds = []
        for i, name in enumerate(found):
            kind = LAYER_KINDS.get(name) if isinstance(name, str) else None
            if kind not in allowed:
                known = ", ".join(n for n, k in LAYER_KINDS.items() if k in allowed)
                raise ConfigError(
                    f"{self._where}{used}[{i}]", f"layer kind {name!r} is not implemented; known: {known}"
                )
            kinds.append(kind)
        return tuple(kinds)

    def layer_indices(self, key: str, layers: int, default: list | None = None) -> list[int]:
        """A list of layers by their number, below `layers`."""
        indices = self.items(key, default=default)
        for i in indices:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers:
                raise ConfigError(self._where + key, f"{i!r} is no layer; num_hidden_layers is {layers}")
        return indices

    def rope(
        self,
        head_dim: int,
        *,
        partial: float | None = None,
        default_theta: float | None = None,
        layer_type: str | None = None,
    ) -> Rope:
        """Rotary frequencies, from `rope_parameters` (5.x), or `rope_theta` and `rope_scaling` at the top level.

        `partial` is the rotated share of a head of families whose configs do not say it at the top level, `layer_type`
        the section of `rope_parameters` that counts in those with one for each.
        """
        nested = self.section("rope_parameters" if layer_type or self.has("rope_parameters") else "rope_scaling")
        if layer_type is not None:
            nested = nested.section(layer_type)
        theta = (nested if layer_type or nested.has("rope_theta") else self).number("rope_theta", default=default_theta)
        share = "partial_rotary_factor"
        if partial is None or nested.has(share):
            partial = (nested if nested.has(share) else self).number(share, default=1.0)
        plain = plain_frequencies(theta, int(head_dim * partial))
        kind = nested.text("rope_type", "type", default="default")
        if kind == "default":
            return Rope(_floats(plain))
        if kind == "linear":
            return Rope(_floats(plain / nested.number("factor")))
        if kind == "proportional":
            turned = proportional_frequencies(theta, head_dim, partial)
            return Rope(_floats(turned / nested.number("factor", default=1.0)))
        if kind == "llama3":
            original = nested.integer("original_max_position_embeddings")
            bands = (nested.number("low_freq_factor"), nested.number("high_freq_factor"))
            return Rope(_floats(llama3_frequencies(plain, nested.number("factor"), *bands, original)))
        if kind == "yarn":
            return self._yarn(nested, plain, theta)
        raise ConfigError(
            f"{nested._where}rope_type",
            f"{kind!r} is not implemented; supported: default, linear, proportional, llama3, yarn",
        )

    def _yarn(self, nested: "HfConfig", plain: Any, theta: float) -> Rope:
        for key in ("mscale", "mscale_all_dim", "truncate"):
            if nested.has(key):
                raise ConfigError(f"{nested._where}{key}", f"{nested.raw[key]!r} is not implemented for yarn")
        factor = nested.number("factor")
        betas = (nested.number("beta_fast", default=32.0), nested.number("beta_slow", default=1.0))
        length = self.integer("max_position_embeddings")
        original = nested.integer("original_max_position_embeddings", default=length)
        frequencies = yarn_frequencies(plain, theta, factor, *betas, original)
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return Rope(_floats(frequencies), nested.number("attention_factor", default=magnitude))

    def _lacks(self, key: str, *aliases: str) -> ConfigError:
        others = f" (or {', '.join(aliases)})" if aliases else ""
        return ConfigError(self._where + key, f"config.json lacks this key{others}; the model cannot be built")

    def _find(self, kind: Any, described: str, key: str, aliases: tuple[str, ...], default: Any) -> Any:
        found = {k: self.raw[k] for k in (key, *aliases) if self.has(k)}
        if not found:
            if default is None:
                raise self._lacks(key, *aliases)
            return default
        name, value = next(iter(found.items()))
        for other, second in found.items():
            if second != value:
                raise ConfigError(self._where + name, f"{value!r} contradicts {other}: {second!r}; keep one of them")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not object):
            raise ConfigError(self._where + name, f"must be {described}, got {value!r}")
        return value


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError naming the file when it is missing or broken."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("model", f"{path} does not exist; point at a directory that holds a config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("model", f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("model", f"{path} holds {type(raw).__name__}, not an object")
    return raw


def _decoded(value: Any) -> Any:
    """Values as transformers 5 writes them: {"__float__": "Infinity"} is a float that JSON cannot spell."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"])
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value


def _floats(frequencies: Any) -> tuple[float, ...]:
    return tuple(float(f) for f in frequencies)
