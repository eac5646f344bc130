"""HfConfig: strict reading of a Hugging Face config.json. Families read their keys through it, and nowhere else.

A key that is needed and missing, or of the wrong type, raises ConfigError with the key's name; a default is used
only where the caller states one, which must be the published one of that family.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jhybrid.errors import ConfigError
from kernels_pallas.activations import ACTIVATIONS

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

TEXT_SECTIONS = ("text_config", "llm_config")  # in which models of several kinds of input have the text model's keys
LONGEST_SHOWN = 200  # characters of a value in a message
LARGEST_INTEGER = 2**31 - 1  # of a size: an axis of an array
LARGEST_FLOAT = 3.4e38  # of float32
MOST = {"num_hidden_layers": 4096} | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16)
MOST |= dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "num_mem_blocks"), 4096)
"""Of what is listed one by one before any weight is read."""


class HfConfig:
    """One JSON object of a config, with typed look-ups. `where` prefixes the key in messages."""

    def __init__(self, raw: Mapping[str, Any], where: str = ""):
        self.raw = {
            key: [_decoded(item) for item in value] if isinstance(value, list) else _decoded(value)
            for key, value in raw.items()
        }
        self._where = where

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return self.raw.get(key) is not None

    def named(self, key: str) -> str:
        """A key as messages spell it."""
        return self._where + key

    def integer(
        self, key: str, *aliases: str, default: int | None = None, least: int = 1, most: int | None = None
    ) -> int:
        value = self._find(int, "an integer", key, aliases, default)
        if value < least:
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ConfigError(self.named(key), f"must be {bounds}, got {_short(value)}")
        largest = min(MOST.get(key, LARGEST_INTEGER), LARGEST_INTEGER if most is None else most)
        if value > largest:
            raise ConfigError(self.named(key), f"must be between {least} and {largest}, got {_short(value)}")
        return value

    def multiple(self, key: str, *aliases: str, of: tuple[str, int]) -> int:
        """An integer that another key's value must divide."""
        value = self.integer(key, *aliases)
        if value % of[1]:
            raise ConfigError(self.named(key), f"{value} is not a multiple of {of[0]}={of[1]}")
        return value

    def number(
        self,
        key: str,
        *aliases: str,
        default: float | None = None,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
    ) -> float:
        """A finite number; `least` and `most` are allowed, `above` is not."""
        value = self._find((int, float), "a number", key, aliases, default)
        if not abs(value) <= LARGEST_FLOAT:
            raise ConfigError(self.named(key), f"must be finite, got {_short(value)}")
        low, high = least if above is None else above, most
        if (low is not None and (value < low or value == above)) or (high is not None and value > high):
            bounds = f"{'at least' if above is None else 'above'} {low}" if low is not None else ""
            bounds += " and " * (low is not None and high is not None) + (f"at most {high}" if high is not None else "")
            raise ConfigError(self.named(key), f"must be {bounds}, got {_short(value)}")
        return float(value)

    def flag(self, key: str, *aliases: str, default: bool | None = None) -> bool:
        value = self._find(object, "true or false", key, aliases, default)
        if not isinstance(value, bool):
            raise ConfigError(self.named(key), f"must be true or false, got {_short(value)}")
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
            raise ConfigError(
                self.named(key), f"{_short(value)} is not implemented for this family; supported: {listed}"
            )
        return value

    def activation(self, key: str, default: str | None = None) -> str:
        name = self.text(key, default=default)
        if name not in ACTIVATIONS:
            raise ConfigError(self.named(key), f"{name!r} is not implemented; supported: {', '.join(ACTIVATIONS)}")
        return name

    def dt_limit(self, *keys: str) -> tuple[float, float]:
        """The clamp of Mamba2's step size; (0, inf), which is no clamp, where absent."""
        pair = self.items(*keys, default=[0.0, float("inf")])
        if len(pair) != 2 or not all(isinstance(x, int | float) for x in pair) or not 0 <= pair[0] <= pair[1]:
            raise ConfigError(self._where + keys[0], f"must be [low, high] with 0 <= low <= high, got {_short(pair)}")
        return float(pair[0]), float(pair[1])

    def layer_kinds(
        self, key: str, *aliases: str, allowed: tuple[str, ...], layers: int | None = None
    ) -> tuple[str, ...]:
        """A list of layer types in either spelling, as our names; an unknown one is refused with its position, and
        another number of them than `layers`."""
        found = self.items(key, *aliases)
        used = next(k for k in (key, *aliases) if self.has(k))
        kinds = []
        for i, name in enumerate(found):
            kind = LAYER_KINDS.get(name) if isinstance(name, str) else None
            if kind not in allowed:
                known = ", ".join(n for n, k in LAYER_KINDS.items() if k in allowed)
                raise ConfigError(
                    f"{self._where}{used}[{i}]", f"layer kind {_short(name)} is not implemented; known: {known}"
                )
            kinds.append(kind)
        if layers is not None and len(kinds) != layers:
            raise ConfigError(key, f"names {len(kinds)} layers, but num_hidden_layers is {layers}")
        return tuple(kinds)

    def layer_indices(self, key: str, layers: int, default: list | None = None) -> list[int]:
        """A list of layers by their number, below `layers`."""
        indices = self.items(key, default=default)
        for i in indices:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers:
                raise ConfigError(self.named(key), f"{_short(i)} is no layer; num_hidden_layers is {layers}")
        return indices

    def _lacks(self, key: str, *aliases: str) -> ConfigError:
        others = f" (or {', '.join(aliases)})" if aliases else ""
        return ConfigError(self.named(key), f"config.json lacks this key{others}; the model cannot be built")

    def _find(self, kind: Any, described: str, key: str, aliases: tuple[str, ...], default: Any) -> Any:
        found = {k: self.raw[k] for k in (key, *aliases) if self.has(k)}
        if not found:
            if default is None:
                raise self._lacks(key, *aliases)
            return default
        name, value = next(iter(found.items()))
        for other, second in found.items():
            if second is not value and second != value:
                raise ConfigError(
                    self._where + name, f"{_short(value)} contradicts {other}: {_short(second)}; keep one of them"
                )
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not object):
            raise ConfigError(self._where + name, f"must be {described}, got {_short(value)}")
        return value


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError naming the file when it is missing or broken."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("model", f"{path} does not exist; point at a directory that holds a config.json") from None
    except OSError as error:
        raise ConfigError("model", f"{path} cannot be read: {error}; it must be a file") from error
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise ConfigError("model", f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("model", f"{path} holds {type(raw).__name__}, not an object")
    return raw


def _decoded(value: Any) -> Any:
    """Values as transformers 5 writes them: {"__float__": "Infinity"} is a float that JSON cannot spell."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        with contextlib.suppress(TypeError, ValueError):  # what is no float stays, and is refused where it is read
            return float(value["__float__"])
    return value


def _short(value: Any) -> str:
    """For a message: a value's first characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists without end
        return f"a huge {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
