"""Corpus: plain-text works cleaned, split into training and held-out works, tokenised and cut into windows.

The trainer calls it. Everything here is a function of the files and the recipe alone: the same corpus and seed give
the same batch at every step, which is what makes a resumed run equal an uninterrupted one.
"""

import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jhybrid.errors import ConfigError

BOS, EOS = "<bos>", "<eos>"
BOS_ID, EOS_ID = 0, 1

# As GPT-2's, but digits are single and a run of line breaks is one piece, since verse is full of them.
PIECES = r"'(?:[a-z]{1,2}\b)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+"
SCENE = re.compile(r"^(?:ACT|SCENE|PROLOGUE|EPILOGUE|[IVXLC]+$|\d+$)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    """Cleaned works by name; no work is in both halves."""

    training: Mapping[str, str]
    heldout: Mapping[str, str]

    @property
    def heldout_text(self) -> str:
        """All held-out works, one after the other."""
        return "\n\n".join(self.heldout[name] for name in sorted(self.heldout))


def read_corpus(path: str | Path, pattern: str, heldout: tuple[str, ...]) -> Corpus:
    """Works of a source archive (`.tar.gz`), a directory or one text file.

    `pattern` is a glob on the file name; a work's name is its file name without suffix. `heldout` names the works
    that are kept out of training. Raises ConfigError naming what was not found.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError("corpus", f"{path} does not exist; give a text file, a directory of them or a .tar.gz")
    works = {name: clean(text) for name, text in _raw_works(path, pattern)}
    if not works:
        raise ConfigError("corpus", f"{path} has no file matching {pattern!r}")
    unknown = sorted(set(heldout) - works.keys())
    if unknown or not heldout:
        raise ConfigError("heldout", f"{unknown or 'nothing'} named, the works are {', '.join(sorted(works))}")
    training = {name: text for name, text in sorted(works.items()) if name not in heldout}
    if not training:
        raise ConfigError("heldout", "every work is held out, none is left to train on")
    return Corpus(training, {name: works[name] for name in sorted(heldout)})


def _raw_works(path: Path, pattern: str) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in sorted(path.rglob(pattern)):
            yield file.stem, _decode(file.read_bytes())
    elif path.name.endswith((".tar.gz", ".tgz")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and PurePosixPath(member.name).match(pattern):
                    content = archive.extractfile(member)
                    assert content is not None, member.name
                    yield PurePosixPath(member.name).stem, _decode(content.read())
    else:
        yield path.stem, _decode(path.read_bytes())


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")  # what older transcriptions use; every byte is valid in it


def clean(text: str) -> str:
    """The text with its line ends, indents, blank runs and rules normalised; words are left alone."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ").replace("\ufeff", "")
    text = re.sub(r"^by William Shakespeare *$", "", text, flags=re.MULTILINE | re.IGNORECASE)
    text = re.sub(r"^[ *=_-]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\S) {2,}", " ", text)
    text = re.sub(r"^ +| +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def scenes(text: str) -> list[str]:
    """The text cut before each heading of an act, a scene or a numbered poem; joined, they give it back."""
    cuts = [match.start() for match in SCENE.finditer(text)]
    edges = sorted({0, len(text), *cuts})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    # A heading alone ("ACT I.") belongs to the scene that follows it.
    joined: list[str] = []
    for piece in pieces:
        if joined and len(joined[-1]) < 80:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries, `<bos>` = 0 and `<eos>` = 1; encoding puts `<bos>` first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """[T] int32 tokens of the text, without `<bos>`."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def token_stream(tokenizer: Tokenizer, works: Mapping[str, str]) -> np.ndarray:
    """[T] int32: all works back to back, an `<eos>` after each scene."""
    parts: list[np.ndarray] = []
    for name in sorted(works):
        for scene in scenes(works[name]):
            parts += [encode(tokenizer, scene), np.array([EOS_ID], np.int32)]
    return np.concatenate(parts)


class Windows:
    """Training batches of a token stream: `<bos>`, then `length` tokens from the start of a line.

    One epoch tiles the stream once from a random shift, in random order; each start then moves back to the start of
    its line, because that is where prompts start. `batch(step)` depends on the seed and the step alone.
    """

    def __init__(self, stream: np.ndarray, line_starts: np.ndarray, batch: int, length: int, seed: int):
        self.per_epoch = (len(stream) - 2 * length) // length // batch
        if self.per_epoch < 1:
            need = (batch + 2) * length
            raise ConfigError(
                "corpus", f"{len(stream)} tokens are less than one batch of {need}; lower batch or length"
            )
        self._stream, self._line_starts = stream, line_starts
        self._batch, self._length, self._seed = batch, length, seed
        self._starts = lru_cache(maxsize=2)(self._epoch_starts)

    def batch(self, step: int) -> np.ndarray:
        """[B, length + 1] int32: inputs are all but the last column, targets all but the first."""
        epoch, index = divmod(step, self.per_epoch)
        starts = self._starts(epoch)[index * self._batch : (index + 1) * self._batch]
        rows = np.empty((self._batch, self._length + 1), np.int32)
        rows[:, 0] = BOS_ID
        rows[:, 1:] = self._stream[starts[:, None] + np.arange(self._length)]
        return rows

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, epoch])
        shift = int(rng.integers(self._length))
        tiles = shift + self._length * np.arange((len(self._stream) - shift) // self._length)
        tiles = self._line_starts[np.searchsorted(self._line_starts, tiles, side="right") - 1]
        return rng.permutation(tiles)


def line_starts(tokenizer: Tokenizer, stream: np.ndarray) -> np.ndarray:
    """Sorted positions of the stream that begin a line: its first token, and those after a line break or `<eos>`."""
    breaks = np.zeros(tokenizer.get_vocab_size(), bool)
    breaks[EOS_ID] = True
    for token in range(tokenizer.get_vocab_size()):
        breaks[token] |= tokenizer.decode([token]).endswith("\n")
    return np.concatenate([[0], np.flatnonzero(breaks[stream[:-1]]) + 1])
