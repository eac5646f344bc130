"""Dispatch: which implementations of the ops a device and the settings ask for."""

from collections.abc import Iterator
from contextlib import contextmanager

from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError
from kernels_pallas.chips import chip_of
from kernels_pallas.paged_attention.append import TILE
from kernels_pallas.target import Target


def target_of(config: EngineConfig, device_kind: str, capability: str | None = None) -> Target:
    """Where the ops of a step run and with which implementations, on a device of that kind.

    `capability` is an NVIDIA GPU's compute capability, as "9.0". Raises ConfigError for pages that the device does not
    update in place.
    """
    asked = config.attention_impl, config.ssm_impl, config.moe_impl
    attention, ssm, moe = (None if impl == "auto" else impl for impl in asked)
    chip = chip_of(device_kind)
    if chip is not None and config.kv_cache_dtype == "fp8" and config.page_size % TILE:
        raise ConfigError(
            "page_size",
            f"{config.page_size} with kv_cache_dtype fp8 on a TPU, whose tiles have {TILE} tokens of 8 bits; "
            f"use a multiple of {TILE}",
        )
    return Target(chip, attention, ssm, moe, capability=capability)


@contextmanager
def refusals(target: Target) -> Iterator[None]:
    """An implementation that was asked for by name and does not take the model, or the device, is a ConfigError."""
    try:
        yield
    except NotImplementedError as error:
        asked = {"attention_impl": target.attention, "ssm_impl": target.ssm, "moe_impl": target.moe}
        named = {name: impl for name, impl in asked.items() if impl is not None}
        if not named:
            raise
        values = ", ".join(map(repr, named.values()))
        raise ConfigError(" or ".join(named), f"{values}: {error}; use auto") from error
