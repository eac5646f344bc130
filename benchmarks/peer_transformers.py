"""The same figures for Hugging Face transformers, in an environment of its own (torch, transformers; not jhybrid).

    OTHER_PYTHON benchmarks/peer_transformers.py benchmarks/models/granite_h_156m

Random weights, float32, its plain torch path. Prints one JSON object; `compare.py` runs it beside the engine.
"""

import argparse
import json
import statistics
import time

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM


def prefill(model: torch.nn.Module, length: int) -> float:
    """Tokens per second of one forward pass over a prompt, its last logits only."""
    ids = torch.randint(0, model.config.vocab_size, (1, length))
    started = time.perf_counter()
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return length / (time.perf_counter() - started)


def decode(model: torch.nn.Module, size: int, prompt: int, output: int) -> float:
    """Tokens per second of greedy decoding after a prompt, `size` sequences at once."""
    ids = torch.randint(0, model.config.vocab_size, (size, prompt))
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    started = time.perf_counter()
    for _ in range(output):
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(input_ids=ids, cache=out.cache, use_cache=True)
    return size * output / (time.perf_counter() - started)


def check(model: torch.nn.Module) -> None:
    """Its cache is used: a cached step gives what the whole sequence does. Some models start anew without a word."""
    ids = torch.randint(0, model.config.vocab_size, (1, 9))
    out = model(input_ids=ids[:, :8], use_cache=True)
    step = model(input_ids=ids[:, 8:], cache=out.cache, use_cache=True).logits[:, -1]
    torch.testing.assert_close(step, model(input_ids=ids).logits[:, -1], rtol=0, atol=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory with a config.json")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)  # `compare.py` has rounds
    asked = parser.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
    with torch.inference_mode():
        check(model)
        prefills = [prefill(model, asked.prefill_tokens) for _ in range(asked.repeats + 1)][1:]
        rows = []
        for size in asked.batch_sizes:
            rates = [decode(model, size, asked.prompt_tokens, asked.output_tokens) for _ in range(asked.repeats)]
            rows.append({"batch_size": size, "tokens_per_second": statistics.median(rates)})
    print(
        json.dumps(
            {
                "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
                "prefill": {"tokens": asked.prefill_tokens, "tokens_per_second": statistics.median(prefills)},
                "decode": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
