"""EngineConfig: what cannot work is refused when it is read, with the field and the remedy."""

import pytest

from jhybrid import ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", -1),
        ("page_size", 0),
        ("num_pages", 0),
        ("max_model_len", -5),
        ("max_queue", 0),
        ("chunk_size", 0),
        ("dtype", "float16"),
        ("kv_cache_dtype", "int4"),
        ("kv_cache_dtype", "int8"),
        ("state_dtype", "auto"),
        ("load_format", "gguf"),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.5),
        ("tensor_parallel_size", 0),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(field: str, value: object):
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**{field: value})
    assert refusal.value.field == field
    assert repr(value) in str(refusal.value) or str(value) in str(refusal.value)


def test_a_page_size_that_does_not_divide_comes_with_one_that_would():
    with pytest.raises(ConfigError, match=r"page_size: 16 does not divide max_model_len=100; .*max_model_len=96"):
        EngineConfig(max_model_len=100)
    EngineConfig(max_model_len=96)


def test_the_compilation_cache_follows_flag_then_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JHYBRID_CACHE_DIR", "/somewhere")
    assert str(EngineConfig().compilation_cache()) == "/somewhere"
    assert str(EngineConfig(compilation_cache_dir="/else").compilation_cache()) == "/else"
    assert EngineConfig(compilation_cache_dir="").compilation_cache() is None
    monkeypatch.delenv("JHYBRID_CACHE_DIR")
    assert str(EngineConfig().compilation_cache()).endswith(".cache/jhybrid")
