"""An engine on virtual devices beside one on a single device: the same answers. Run by test_mesh.py.

Usage: python engine_on_mesh.py MODEL SHARDS [OPTIONS as JSON]; the number of devices is set by XLA_FLAGS.
"""

import dataclasses
import json
import re
import sys
from typing import Any

import numpy as np

from jhybrid import Engine, EngineConfig, Request, SamplingParams
from jhybrid.request import Output

SIZES = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "chunk_size": 16, "page_size": 8}


def answers(config: EngineConfig) -> tuple[list[Output], dict[str, int], list[str]]:
    """With the bytes that are held, and the dimensions of what the steps gather from all devices."""
    plain = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=3)
    scored = dataclasses.replace(plain, prompt_logprobs=1)  # for which no prefix is taken from the cache
    prompts = [list(range(1, n)) for n in (5, 30, 40)]
    with Engine(config) as engine:
        outputs = engine.generate([Request(prompt_token_ids=prompt, sampling=scored) for prompt in prompts])
        outputs += engine.generate([Request(prompt_token_ids=prompt, sampling=plain) for prompt in prompts])
        assert engine.compilations_after_ready == 0
        text = "".join(program.as_text() for program in engine.runner._programs.steps.values())
        gathered = set(re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text))
        return outputs, engine.runner.memory.by_kind(), sorted(gathered)


def main(model: str, shards: int, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"dtype": "float32", **SIZES, **options}
    alone, memory, _ = answers(EngineConfig(model, **given))
    spread, shared, gathered = answers(EngineConfig(model, tensor_parallel_size=shards, **given))
    for ours, theirs in zip(spread, alone, strict=True):
        assert ours.token_ids == theirs.token_ids, (ours, theirs)
        assert ours.cached_tokens == theirs.cached_tokens
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [token for token, _ in mine] == [token for token, _ in other]
            np.testing.assert_allclose([p for _, p in mine], [p for _, p in other], rtol=0, atol=1e-4)
        of_prompts = ((output.prompt_logprobs or [])[1:] for output in (ours, theirs))
        for mine, other in zip(*of_prompts, strict=True):
            np.testing.assert_allclose(mine[0][1], other[0][1], rtol=0, atol=1e-4)
    cached = [o.cached_tokens for o in spread]
    print(json.dumps({"alone": memory, "shared": shared, "cached_tokens": cached, "gathered": gathered}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
