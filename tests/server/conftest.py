"""A server over the real engine, on a small hybrid checkpoint, that the tests of this folder share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jhybrid import Engine, EngineConfig
from jhybrid.tokenizer import ByteTokenizer
from tests.conftest import GOLDEN
from tests.server.serving import Served, eventually, serving

CHECKPOINT = GOLDEN / "nemotron_h_dense"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


@pytest.fixture(scope="session")
def hybrid_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(CHECKPOINT / name, directory)
    ByteTokenizer(chat_template=TEMPLATE).save(directory)
    config = EngineConfig(
        str(directory),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        page_size=8,
        chunk_size=8,
        enable_prefix_caching=True,
    )
    with Engine(config) as engine, serving(lambda: engine) as served:
        yield served


@pytest.fixture
def hybrid(hybrid_server: Served) -> Iterator[Served]:
    """The server with an empty cache; a test must leave everything given back, and nothing compiled."""
    compiled = hybrid_server.client.status().compilations_after_ready  # by other tests of this process
    yield hybrid_server
    eventually(lambda: all_given_back(hybrid_server), 2.0)
    hybrid_server.client.flush_cache()
    status = hybrid_server.client.status()
    assert (status.pages.used, status.slots.used, status.snapshots.used) == (0, 0, 0)
    assert status.compilations_after_ready == compiled


def all_given_back(served: Served) -> bool:
    """Whether nothing runs or waits, and no page or slot is held but for cached prefixes."""
    status = served.client.status()
    return not (status.running or status.waiting or status.pages.used or status.slots.used)
