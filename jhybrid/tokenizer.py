"""Tokenizer: text to token ids and back. The engine encodes prompts with it, the detokenizer decodes answers.

Decoding is defined by bytes: every token stands for `token_bytes(id)`, text is those bytes as UTF-8, and what is
no UTF-8 becomes U+FFFD. So a stream of tokens decodes to the same text however it is cut.
"""

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from jhybrid.errors import ConfigError
from jhybrid.models.hf_config import TEXT_SECTIONS

log = logging.getLogger("jhybrid")

SHORT = 128
"""Characters up to which a text is encoded by the call that costs least; it stops all threads meanwhile."""

ADDITIONAL_TEMPLATES = "additional_chat_templates"  # folder of a model with a file for each named template


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer, whichever kind it is."""

    vocab_size: int  # one above the highest token id; a model may pad its vocabulary beyond
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # all ids that end an answer, the one that ends a turn first
    chat_templates: dict[str, str]  # by name; `default` is the one for plain chats
    named_tokens: dict[str, str]  # bos_token, eos_token, ... as chat templates read them
    longest: int  # characters of a text that one token can stand for, at most, but for what normalisers leave out

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. With `add_special_tokens`, BOS leads where the model wants it, and never twice."""
        ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids that the tokenizer does not know are no text."""
        ...

    def token_bytes(self, token: int, first: bool = False) -> bytes:
        """Bytes that one token stands for; `first`: it opens the text, where some tokenizers drop a space."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token such as BOS or EOS, which answers leave out."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves, special tokens follow: `<bos>` 256 and `<eos>` 257 unless told otherwise."""

    def __init__(
        self,
        vocab_size: int | None = None,
        special_tokens: tuple[str, ...] = ("<bos>", "<eos>"),
        add_bos: bool = True,
        chat_template: str | None = None,
    ):
        """The first special token is BOS, the second EOS. `vocab_size` counts padding ids too, which are no text."""
        least = 256 + len(special_tokens)
        self.vocab_size = least if vocab_size is None else vocab_size
        if len(special_tokens) < 2 or self.vocab_size < least:
            raise ConfigError(
                "vocab_size", f"{self.vocab_size} holds no 256 bytes and BOS and EOS; use at least {least}"
            )
        self.special_tokens = {text: 256 + i for i, text in enumerate(special_tokens)}
        self.bos_token_id: int | None = 256
        self.eos_token_ids: tuple[int, ...] = (257,)
        self.add_bos = add_bos
        self.chat_templates = {} if chat_template is None else {"default": chat_template}
        self.named_tokens = {"bos_token": special_tokens[0], "eos_token": special_tokens[1]}
        self.longest = max(map(len, special_tokens))
        self._texts = {token: text.encode() for text, token in self.special_tokens.items()}
        self._pattern = re.compile("(" + "|".join(re.escape(text) for text in special_tokens) + ")")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for piece in self._pattern.split(well_formed(text)):
            special = self.special_tokens.get(piece)
            ids.extend(piece.encode()) if special is None else ids.append(special)
        return with_prefix([256] if self.add_bos and add_special_tokens else [], ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return decode_bytes(self, ids, skip_special_tokens)

    def token_bytes(self, token: int, first: bool = False) -> bytes:
        del first  # no token of this kind depends on its place
        return bytes((token,)) if 0 <= token < 256 else self._texts.get(token, b"")

    def is_special(self, token: int) -> bool:
        return token in self._texts

    def save(self, directory: Path) -> None:
        """Write the same tokenizer as Hugging Face files, which `load_tokenizer` and other software read."""
        bos = self.named_tokens["bos_token"]
        native = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=_BYTE_LEVEL, merges=[]))
        native.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        native.decoder = tokenizers.decoders.ByteLevel()
        added = [tokenizers.AddedToken(text, special=True, normalized=False) for text in self.special_tokens]
        native.add_special_tokens(added)
        if self.add_bos:
            native.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, 256)]
            )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            **self.named_tokens,
        }
        if "default" in self.chat_templates:
            config["chat_template"] = self.chat_templates["default"]
        native.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class HuggingFaceTokenizer:
    """A `tokenizer.json` and the files beside it. Byte-level, sentencepiece-like and byte-fallback kinds alike."""

    def __init__(self, directory: Path):
        """Read the directory's tokenizer. Raises ConfigError naming the file that is at fault."""
        path = directory / "tokenizer.json"
        text = _read_text(path)
        _parse(path, text)
        try:
            self._native = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise ConfigError(path.name, f"{path} is no tokenizer: {error}; fetch or convert it again") from error
        self._native.no_truncation()  # files saved while training may carry a length, which would cut prompts silently
        self._native.no_padding()
        config = _read_json(directory / "tokenizer_config.json") or {}
        special_map = _read_json(directory / "special_tokens_map.json") or {}
        self.named_tokens = _named_tokens(special_map) | _named_tokens(config)
        self.chat_templates = _chat_templates(directory, config)
        vocabulary = self._native.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest = max(map(len, vocabulary), default=1)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_ids = read_eos_token_ids(directory, self._id_of("eos_token"))
        added = self._native.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._prefix, self._suffix = self._wrapping(config.get("add_bos_token"))
        self._byte_level, self._byte_fallback = _decoder_kinds(self._native.decoder)
        self._probe = next(iter(self._native.encode("a", add_special_tokens=False).ids), 0)
        self._bytes: dict[tuple[int, bool], bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        text = well_formed(text)
        if len(text) > SHORT:
            ids = self._native.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = self._native.encode(text, add_special_tokens=False).ids
        return with_prefix(self._prefix, ids) + self._suffix if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return decode_bytes(self, ids, skip_special_tokens)

    def token_bytes(self, token: int, first: bool = False) -> bytes:
        found = self._bytes.get((token, first))
        if found is None:
            found = self._bytes[token, first] = self._find_bytes(token, first)
        return found

    def is_special(self, token: int) -> bool:
        return token in self._special

    def _find_bytes(self, token: int, first: bool) -> bytes:
        piece = self._native.id_to_token(token) if token >= 0 else None
        if piece is None:
            return b""
        if self._byte_level:
            values = [_BYTE_LEVEL.get(char) for char in piece]
            return bytes(v for v in values if v is not None) if None not in values else piece.encode()
        match = _BYTE_PIECE.fullmatch(piece) if self._byte_fallback else None
        if match and (int(match[1], 16) >= 128 or not first):
            return bytes((int(match[1], 16),))
        # What a token adds to a text is read off the library itself: alone, or after another token.
        if first:
            return self._native.decode([token], skip_special_tokens=False).encode()
        lead = self._native.decode([self._probe], skip_special_tokens=False)
        return self._native.decode([self._probe, token], skip_special_tokens=False)[len(lead) :].encode()

    def _id_of(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        if text is None:
            return None
        token = self._native.token_to_id(text)
        if token is None:
            raise ConfigError(
                "tokenizer_config.json", f"{name} {text!r} is not in the vocabulary of tokenizer.json; correct either"
            )
        return token

    def _wrapping(self, add_bos: bool | None) -> tuple[list[int], list[int]]:
        """Ids put before and after every text: the post-processor's, with BOS as `add_bos_token` says if it says."""
        bare = self._native.encode("a", add_special_tokens=False).ids
        full = self._native.encode("a", add_special_tokens=True).ids
        extra = len(full) - len(bare)
        start = next((i for i in range(extra + 1) if full[i : i + len(bare)] == bare), None)
        if start is None:
            raise ConfigError(
                "tokenizer.json", "the post_processor changes the text's own tokens; only additions are read"
            )
        prefix, suffix = full[:start], full[start + len(bare) :]
        if self.bos_token_id is None or add_bos is None:
            return prefix, suffix
        rest = [token for token in prefix if token != self.bos_token_id]
        return ([self.bos_token_id, *rest] if add_bos else rest), suffix


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None where it has none: such a model takes and gives token ids only.

    Raises ConfigError naming the file if it cannot be read, or if only a form is present that is not supported.
    """
    directory = Path(directory)
    if (directory / "tokenizer.json").exists():
        return HuggingFaceTokenizer(directory)
    for name in ("tokenizer.model", "vocab.json", "vocab.txt"):
        if (directory / name).exists():
            raise ConfigError(
                name,
                f"{directory / name} is there but tokenizer.json is not; write one with transformers: "
                "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)",
            )
    return None


def read_eos_token_ids(
    directory: str | Path, tokenizer_eos: int | None = None, vocab_size: int | None = None
) -> tuple[int, ...]:
    """Every id that ends an answer: generation_config.json's, else config.json's, and the tokenizer's own.

    Those that a model of `vocab_size` tokens cannot give are left out, with a warning.
    """
    directory = Path(directory)
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = _read_json(directory / name) or {}
        value = config.get("eos_token_id")
        for section in TEXT_SECTIONS:
            if value is None and isinstance(config.get(section), dict):
                config = config[section]
                value = config.get("eos_token_id")
        if value is None:
            continue
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in found):
            raise ConfigError(name, f"eos_token_id {value!r} in {directory / name} is neither an id nor a list of ids")
        break
    if tokenizer_eos is not None:
        found = [*found, tokenizer_eos]
    if beyond := [token for token in found if vocab_size is not None and token >= vocab_size]:
        log.warning(
            "%s: eos_token_id %s is none of the model's %d tokens, so no answer ends there; correct it in "
            "generation_config.json, config.json or the tokenizer's files, or give stop_token_ids",
            directory,
            ", ".join(map(str, beyond)),
            vocab_size,
        )
    return tuple(dict.fromkeys(token for token in found if token not in beyond))


def decode_bytes(tokenizer: Tokenizer, ids: Iterable[int], skip_special_tokens: bool) -> str:
    """Text of `ids`: their bytes as UTF-8, where each broken character gives one U+FFFD."""
    pieces: list[bytes] = []
    for token in ids:
        if not (skip_special_tokens and tokenizer.is_special(token)):
            pieces.append(tokenizer.token_bytes(token, first=not pieces))
    return b"".join(pieces).decode("utf-8", errors="replace")


def with_prefix(prefix: list[int], ids: list[int]) -> list[int]:
    """`ids` led by `prefix`, of which nothing is put twice where a template or a user has written BOS already."""
    if ids[: len(prefix)] == prefix:
        return ids
    return [*prefix, *(ids[1:] if ids[:1] == prefix[:1] else ids)]


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table), to the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _decoder_kinds(decoder: tokenizers.decoders.Decoder | None) -> tuple[bool, bool]:
    """Whether the decoder (or one in its sequence) is byte-level, and whether it knows byte-fallback tokens."""
    if decoder is None:
        return False, False
    state = json.loads(decoder.__getstate__())
    kinds = {part["type"] for part in state.get("decoders", [state])}
    return "ByteLevel" in kinds, "ByteFallback" in kinds


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`*_token` entries, each a string or an added-token record."""
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: those in tokenizer_config.json, overruled by template files of their own."""
    given = config.get("chat_template")
    templates: dict[str, str] = {}
    for i, entry in enumerate(given if isinstance(given, list) else []):
        for key in ("name", "template"):
            if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
                raise ConfigError(
                    "tokenizer_config.json",
                    f"chat_template[{i}] is {_shown(entry)}; it must be an object with a text as {key!r}",
                )
        templates[entry["name"]] = entry["template"]
    if isinstance(given, str):
        templates["default"] = given
    elif given is not None and not isinstance(given, list):
        raise ConfigError(
            "tokenizer_config.json", f"chat_template is {_shown(given)}; it must be a text or a list of named ones"
        )
    if (directory / "chat_template.jinja").exists():
        templates["default"] = _read_text(directory / "chat_template.jinja")
    for path in sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:100] + "..."


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(path.name, f"{path} cannot be read: {error}; fetch it again") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    return _parse(path, _read_text(path)) if path.exists() else None


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise ConfigError(path.name, f"{path} is no JSON ({error}): it may be cut short; fetch it again") from error
    if not isinstance(value, dict):
        raise ConfigError(path.name, f"{path} holds a {type(value).__name__} where an object was expected")
    return value


def well_formed(text: str) -> str:
    """`text` with U+FFFD for lone surrogates, which JSON can carry and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
