"""How an op's implementation is chosen: the chip's own first, plain JAX where that refuses, a forced one or none."""

import logging
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jhybrid.config import IMPLEMENTATIONS, EngineConfig
from jhybrid.dispatch import refusals, target_of
from jhybrid.errors import ConfigError
from kernels_pallas import causal_conv, experts, gated_delta, implementations, paged_attention, selective_scan, ssd
from kernels_pallas.chips import CHIPS, chip_of
from kernels_pallas.experts.specs import SPECS as EXPERTS
from kernels_pallas.spans import Spans
from kernels_pallas.ssd.specs import SPECS
from kernels_pallas.target import Target


def _arguments() -> tuple:
    """A case whose shapes no TPU kernel takes."""
    args, kwargs = next(spec for spec in SPECS if spec.name == "decode").build(0)
    return args, kwargs


def _on(spans: Spans, **target) -> Spans:
    return replace(spans, target=Target(CHIPS["v5e"], **target))


def test_what_a_kernel_refuses_goes_to_the_next_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    (*inputs, spans), kwargs = _arguments()
    implementations._passed_over.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.clear_caches()
            got, _ = ssd.ssd(*inputs, _on(spans), **kwargs)
    want, _ = ssd.ssd(*inputs, spans, **kwargs, implementation="xla")
    np.testing.assert_array_equal(got, want)
    [record] = caplog.records
    assert "ssd: tpu does not support this (4 heads per group of width 4" in record.message


def test_a_forced_kernel_refuses() -> None:
    (*inputs, spans), kwargs = _arguments()
    with pytest.raises(NotImplementedError, match="multiple of 128 lanes"):
        ssd.ssd(*inputs, _on(spans, ssm="tpu"), **kwargs)
    with pytest.raises(NotImplementedError, match=r"'mlx'.*reference"):
        ssd.ssd(*inputs, _on(spans, ssm="mlx"), **kwargs)


GPU = Target(capability="9.0")


def _tried(monkeypatch: pytest.MonkeyPatch, target: Target, *refuse: str) -> list[str]:
    """The implementations of ssd that are called on a target, in order; those of `refuse` refuse."""
    called = []

    def named(name: str):
        def ssd_of(*_, **__):
            called.append(name)
            if name in refuse:
                raise NotImplementedError("not today")
            return np.zeros(1), None

        return ssd_of

    for name in ssd.IMPLEMENTATIONS:
        monkeypatch.setitem(ssd.IMPLEMENTATIONS, name, named(name))
    jax.clear_caches()
    (*inputs, spans), kwargs = _arguments()
    ssd.ssd(*inputs, replace(spans, target=target), **kwargs)
    jax.clear_caches()
    return called


@pytest.mark.parametrize(
    ("target", "refuse", "want"),
    [
        (GPU, (), ["gpu"]),
        (GPU, ("gpu",), ["gpu", "parallel"]),
        (GPU, ("gpu", "parallel"), ["gpu", "parallel", "xla"]),
        (replace(GPU, ssm="parallel"), (), ["parallel"]),
        (Target(), (), ["xla"]),
        (Target(CHIPS["v5e"]), ("tpu",), ["tpu", "xla"]),
    ],
)
def test_each_device_has_its_order(monkeypatch, target: Target, refuse: tuple[str, ...], want: list[str]) -> None:
    implementations._passed_over.cache_clear()
    assert _tried(monkeypatch, target, *refuse) == want


def test_where_the_gpu_kernel_refuses_plain_jax_runs_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    (*inputs, spans), kwargs = _arguments()
    implementations._passed_over.cache_clear()
    with caplog.at_level(logging.WARNING):
        for capability in ("9.0", "8.0"):
            got, _ = ssd.ssd(*inputs, replace(spans, target=Target(capability=capability)), **kwargs)
            want, _ = ssd.ssd(*inputs, spans, **kwargs, implementation="parallel")
            np.testing.assert_array_equal(got, want)
    small, old = (record.message for record in caplog.records)
    assert small.startswith("ssd: gpu does not support this (state size 8") and small.endswith("trying parallel")
    assert "compute capability 8.0" in old
    with pytest.raises(NotImplementedError, match="state size 8"):
        ssd.ssd(*inputs, replace(spans, target=replace(GPU, ssm="gpu")), **kwargs)


def test_a_gpu_is_known_by_its_compute_capability() -> None:
    target = target_of(EngineConfig(), "NVIDIA H200", "9.0")
    assert target.order == ("gpu", "parallel", "xla")
    assert target_of(EngineConfig(), "cpu").order == ("xla",)
    with pytest.raises(ConfigError, match=r"page_size: 16 with kv_cache_dtype fp8 on a TPU.*multiple of 32"):
        target_of(EngineConfig(kv_cache_dtype="fp8"), "TPU v6 lite")
    assert target_of(EngineConfig(kv_cache_dtype="fp8", page_size=64), "TPU v6 lite").order == ("tpu", "xla")


def test_a_kernel_needs_a_chip() -> None:
    (*inputs, spans), kwargs = _arguments()
    with pytest.raises(NotImplementedError, match="are for TPUs"):
        ssd.ssd(*inputs, spans, **kwargs, implementation="tpu")


def test_forcing_the_scan_forces_the_convolution() -> None:
    (*_, spans), _ = _arguments()
    x, weight, window = np.zeros((4, 12), np.float32), np.zeros((12, 4), np.float32), np.zeros((9, 4, 12), np.float32)
    with pytest.raises(NotImplementedError, match="channels a multiple of 128"):
        causal_conv.causal_conv(x, weight, None, window, _on(spans, ssm="tpu"))


def test_settings_name_what_there_is() -> None:
    ops = (causal_conv, experts, gated_delta, paged_attention, selective_scan, ssd)
    names = set().union(*(op.IMPLEMENTATIONS for op in ops))
    assert {"auto", *names} - {"xla_wy"} == set(IMPLEMENTATIONS)  # xla_wy: xla elsewhere than on CPU, for its tests


def test_what_was_asked_for_and_is_refused_is_an_error_of_the_settings() -> None:
    (*inputs, spans), kwargs = _arguments()
    target = target_of(EngineConfig(ssm_impl="tpu"), "cpu")
    with pytest.raises(ConfigError, match=r"^ssm_impl: 'tpu': .* are for TPUs.*; use auto"), refusals(target):
        ssd.ssd(*inputs, replace(spans, target=target), **kwargs)


def test_an_implementation_of_experts_can_be_forced() -> None:
    args, options = next(spec for spec in EXPERTS if spec.name == "gated").build(0)
    target = target_of(EngineConfig(moe_impl="tpu"), "cpu")
    with pytest.raises(ConfigError, match=r"^moe_impl: 'tpu': .* is for TPUs.*; use auto"), refusals(target):
        experts.experts(*args, **options, target=target)
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    for moe, kernels in (("auto", 1), ("xla", 2)):  # one for all, or one for each product
        target = target_of(EngineConfig(moe_impl=moe), "TPU v6 lite")
        traced = jax.jit(partial(experts.experts, **options, target=target)).trace(*args)
        assert str(traced.jaxpr).count("pallas_call") == kernels


def test_chips_are_known_by_what_devices_call_themselves() -> None:
    assert chip_of("TPU v6 lite") is CHIPS["v6e"]
    assert chip_of("cpu") is None
