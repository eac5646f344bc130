"""lm-evaluation-harness's own `hf` model, in an environment with torch, transformers and lm-eval; not jhybrid.

    OTHER_PYTHON benchmarks/peer_harness.py --make CONFIG_DIRECTORY CHECKPOINT     # random weights
    OTHER_PYTHON benchmarks/peer_harness.py CHECKPOINT ITEMS.json MAX_LENGTH

Prints one JSON object; `eval.py` runs it beside the engine. The harness's own scoring loop is given token ids. Batches
of 1 and 8 are tried on the first items, and the faster way is measured.
"""

import json
import sys
import time

import tokenizers
import torch
import transformers
from lm_eval import __version__
from lm_eval.models.huggingface import HFLM

TRIED = (1, 8)


def make(config: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    settings = transformers.AutoConfig.from_pretrained(config)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(checkpoint)


def score(model: torch.nn.Module, tokenizer: object, batch_size: int, length: int, items: list) -> tuple[float, list]:
    """Seconds and log-likelihoods."""
    harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=batch_size, device="cpu")
    requests = [(("", ""), context, continuation) for context, continuation in items]
    started = time.perf_counter()
    scores = harness._loglikelihood_tokens(requests, disable_tqdm=True)
    return time.perf_counter() - started, [total for total, _ in scores]


def main() -> None:
    if sys.argv[1] == "--make":
        make(*sys.argv[2:])
        return
    checkpoint, path, length = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    native = tokenizers.Tokenizer(tokenizers.models.WordLevel({"t0": 0, "t1": 1}, unk_token="t0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=native, eos_token="t1", pad_token="t1")
    found = {"engine": f"lm-eval {__version__} hf, transformers {transformers.__version__}, torch {torch.__version__}"}
    with open(path) as file:
        work = json.load(file)
    first = next(iter(work.values()))[:8]
    score(model, tokenizer, 1, int(length), first[:1])
    tried = {size: score(model, tokenizer, size, int(length), first)[0] for size in TRIED}
    size = min(tried, key=tried.__getitem__)
    for name, items in work.items():
        seconds, totals = score(model, tokenizer, size, int(length), items)
        found[name] = {
            "items": len(items),
            "seconds": seconds,
            "items_per_second": len(items) / seconds,
            "batch_size": size,
            "totals": totals,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
