"""The Python API as the README and the design print it, on a hybrid with a tokenizer."""

import shutil
from pathlib import Path

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid.tokenizer import ByteTokenizer

from .bed import GOLDEN


def test_the_engine_works_as_printed(tmp_path: Path):
    directory = tmp_path / "hf_dir"
    shutil.copytree(GOLDEN / "nemotron_h_dense", directory)
    ByteTokenizer(263).save(directory)
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        max_num_seqs=2,
        max_model_len=64,
        page_size=16,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
    )
    sampling = SamplingParams(
        max_tokens=16, temperature=0.0, logprobs=5, prompt_logprobs=0, seed=1, stop=["\n\n"], ignore_eos=True
    )
    with Engine(config) as engine:
        [out] = engine.generate([Request(prompt_token_ids=[1, 5, 9], sampling=sampling)])
        assert len(out.token_ids) == 16
        assert engine.tokenizer is not None
        assert out.text == engine.tokenizer.decode(out.token_ids)
        assert [len(entry) for entry in out.logprobs or []] == [5] * 16
        assert out.prompt_logprobs is not None
        assert [entry and len(entry) for entry in out.prompt_logprobs] == [None, 1, 1]
        assert (out.finish_reason, out.cached_tokens) == ("length", 0)
        status = engine.status()
        assert status["running"] == status["waiting"] == status["compilations_after_ready"] == 0
        assert status["pages"]["free"] == status["pages"]["total"]
        assert status["slots"] == {"total": 2, "free": 2, "used": 0, "cached": 0}
        assert {"weights", "kv", "state", "snapshots", "scratch"} <= set(status["memory_bytes"])
        engine.flush_cache()
        [scores] = engine.score([[1, 5, 9]])
        assert scores == [None, out.prompt_logprobs[1][0][1], out.prompt_logprobs[2][0][1]]  # pyright: ignore
