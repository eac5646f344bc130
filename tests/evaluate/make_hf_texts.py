"""Makes hf_texts.json and byte_tokenizer: likelihoods of texts by the harness's own `hf` model on tiny golden models.

    python tests/evaluate/make_hf_texts.py     # needs torch, transformers and lm-eval

Everything goes through the harness's public calls, so its own encoding of contexts and continuations is part of it.
The tokenizer has a token for each byte, two special ones, and five merges, which also join across the seam.
"""

import json
from pathlib import Path

import torch
import transformers
from lm_eval import __version__
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
MODELS = ("nemotron_h_moe", "lfm2", "qwen3_5_moe")
LENGTH = 64
MERGES = [("t", "h"), ("th", "e"), ("Ã", "©"), ("Ġ", "th"), ("o", "r")]
PAIRS = [
    ("", "To be, or not to be"),
    ("", "é"),
    ("The quick brown fox", " jumps"),
    ("The theme of the theory ", "the other"),
    ("with t", "here"),
    ("Käse und Brot: ", "schön, naïve café"),
    ("数学の問題", "は難しい。"),
    ("a family \U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd ok"),
    ("caf", "é"),
    ("x", "y"),
    ("line\n\n", "next\tline"),
    ("abcdefghij" * 10, "k"),
    ("é" * 50, "ñ" * 10),
    ("one two three four five six seven eight nine ten eleven twelve", " thirteen fourteen"),
]
TEXTS = ["", "é", "To be, or not to be.", "the theory of the other " * 8, "数学の問題は難しい。" * 5]


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "<s>", "</s>", *(a + b for a, b in MERGES)]
    native = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    native.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=native, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def greedy_pair(harness: HFLM, tokenizer: transformers.PreTrainedTokenizerFast) -> tuple[str, str]:
    """A context whose likeliest next token is a printable letter, with that letter."""
    for i in range(2000):
        context = f"question {i}:"
        ids = torch.tensor([tokenizer.encode(context)])
        text = tokenizer.decode([int(harness.model(ids).logits[0, -1].argmax())])
        if len(text) == 1 and text.isascii() and text.isalpha():
            return context, text
    raise RuntimeError("no such context")


def main() -> None:
    torch.set_grad_enabled(False)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(HERE / "byte_tokenizer")
    found = {}
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
        harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=1, device="cpu")
        pairs = [*PAIRS, greedy_pair(harness, tokenizer)]
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        scores = harness.loglikelihood(asked, disable_tqdm=True)
        rolled = harness.loglikelihood_rolling(
            [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(TEXTS)], disable_tqdm=True
        )
        found[name] = {
            "pairs": [
                {"context": context, "continuation": continuation, "total": total, "is_greedy": is_greedy}
                for (context, continuation), (total, is_greedy) in zip(pairs, scores, strict=True)
            ],
            "rolling": [{"text": text, "total": total} for text, total in zip(TEXTS, rolled, strict=True)],
        }
    source = (
        f"HFLM of lm-evaluation-harness {__version__}, transformers {transformers.__version__}, max_length {LENGTH}"
    )
    record = {"source": source, "max_length": LENGTH, "models": found}
    (HERE / "hf_texts.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
