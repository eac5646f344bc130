"""Makes hf_likelihoods.json: log-likelihoods by the harness's own `hf` model on tiny models with golden numbers.

    python tests/evaluate/make_hf_likelihoods.py     # needs torch, transformers and lm-eval

Token ids are given to the harness's scoring loop itself, since these models have no tokenizer.
"""

import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from lm_eval import __version__
from lm_eval.models.huggingface import HFLM

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = ("nemotron_h_moe", "lfm2", "qwen3_5_moe")
LENGTH = 64
SHAPES = (
    (1, 1),
    (1, 5),
    (20, 1),
    (20, 7),
    (20, 7),
    (60, 4),
    (63, 1),
    (64, 1),
    (63, 2),
    (61, 4),
    (90, 1),
    (90, 30),
    (3, 64),
)
"""Tokens of context and continuation; a context of one is the prefix that stands for an empty one."""


def cases(vocab: int) -> list[tuple[list[int], list[int]]]:
    """The same tokens lead all contexts that are as long, so that there is something to share."""
    rng = np.random.default_rng(7)
    lead = rng.integers(0, vocab, 90).tolist()
    return [(lead[:context], rng.integers(0, vocab, length).tolist()) for context, length in SHAPES]


def greedy(model: torch.nn.Module, context: list[int], length: int) -> list[int]:
    """The continuation that the model itself would give."""
    tokens = list(context)
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(context) :]


def main() -> None:
    torch.set_grad_enabled(False)
    found = {}
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
        vocab = model.config.get_text_config().vocab_size
        words = {f"t{i}": i for i in range(vocab)}
        native = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=native, eos_token="t1", pad_token="t1")
        harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=1, device="cpu")
        asked = cases(vocab)
        asked.append((asked[2][0], greedy(model, asked[2][0], 6)))
        scores = harness._loglikelihood_tokens([(None, *case) for case in asked], disable_tqdm=True)
        found[name] = [
            {"context": context, "continuation": continuation, "total": total, "is_greedy": is_greedy}
            for (context, continuation), (total, is_greedy) in zip(asked, scores, strict=True)
        ]
    source = (
        f"HFLM of lm-evaluation-harness {__version__}, transformers {transformers.__version__}, max_length {LENGTH}"
    )
    path = Path(__file__).parent / "hf_likelihoods.json"
    path.write_text(json.dumps({"source": source, "max_length": LENGTH, "models": found}) + "\n")


if __name__ == "__main__":
    main()
