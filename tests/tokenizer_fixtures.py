"""Small tokenizers of each kind, made on the spot: byte, byte-level BPE, byte-fallback (sentencepiece-like), words."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jhybrid.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

KINDS = ("byte", "byte_files", "byte_level_bpe", "byte_fallback", "words")
TEXT = ["the quick brown fox jumps over the lazy dog", "你好 世界 你好", "naïve café dš 😀 🤗", "the the dog dog  fox"]


def make_tokenizer(kind: str, directory: Path) -> Tokenizer:
    """A tokenizer of `kind`, its files in `directory`."""
    if kind == "byte":
        return ByteTokenizer(263)
    if kind == "byte_files":
        ByteTokenizer().save(directory)
    else:
        write_files(
            directory, {"byte_level_bpe": byte_level_bpe, "byte_fallback": byte_fallback, "words": words}[kind]()
        )
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def write_files(directory: Path, native: tokenizers.Tokenizer, **config: Any) -> Path:
    """Write tokenizer.json and, with `config`, tokenizer_config.json."""
    native.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    (directory / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return directory


def byte_level_bpe(bos: bool = True) -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Nemotron-H have it; merges cut through multi-byte characters."""
    native = tokenizers.Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(TEXT * 4, trainer)
    if bos:
        native.post_processor = bos_template(native)
    return native


def byte_fallback() -> tokenizers.Tokenizer:
    """As converted sentencepiece models (Llama 2, Gemma) have it: leading space, `<0xNN>` for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("d", "o"), ("do", "g"), ("▁", "dog"), ("▁", "▁")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    native = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    native.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    native.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    native.add_special_tokens(["<unk>", "<s>", "</s>"])
    native.post_processor = bos_template(native)
    return native


def words() -> tokenizers.Tokenizer:
    """WordPiece: a decoder that is neither of the two, with `##` for continuations."""
    pieces = ["[UNK]", "<s>", "</s>", "the", "dog", "fox", "##es", "##s", ",", ".", "café", "😀"]
    native = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    native.decoder = decoders.WordPiece()
    native.add_special_tokens(["[UNK]", "<s>", "</s>"])
    return native


def bos_template(native: tokenizers.Tokenizer) -> processors.TemplateProcessing:
    bos = native.token_to_id("<s>")
    return processors.TemplateProcessing(
        single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", bos)]
    )
