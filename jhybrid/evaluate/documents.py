"""Documents: the texts of a file, and what per-word and per-byte figures divide by."""

import re
from dataclasses import dataclass
from pathlib import Path

from jhybrid.errors import RequestError
from jhybrid.evaluate.line_file import decoded


@dataclass(frozen=True)
class Document:
    """One text, scored by itself."""

    text: str
    line: int = 1
    """Where it begins in its file, from 1."""

    @property
    def num_words(self) -> int:
        """Pieces between white space, counted as lm-evaluation-harness does: white space at an end makes one more."""
        return len(re.split(r"\s+", self.text))

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8; a lone surrogate, which JSON can carry, counts as the U+FFFD that tokens are made of."""
        return len(self.text.encode(errors="surrogatepass"))


def read_documents(path: Path, text_key: str = "text") -> list[Document]:
    """The texts of a `.jsonl` file, one a line under `text_key`; any other file is one text.

    Raises RequestError naming the file, and the line if it is at fault. Empty texts are left out.
    """
    try:
        content = path.read_bytes().decode("utf-8-sig")  # line breaks stay what they are, and are scored
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("file", f"{path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        documents = [Document(content)]
    else:
        lines = enumerate(content.split("\n"), start=1)
        documents = [Document(_text_of(path, n, line, text_key), n) for n, line in lines if line.strip()]
    documents = [document for document in documents if document.text]
    if not documents:
        raise RequestError("file", f"{path} has no text")
    return documents


def _text_of(path: Path, number: int, line: str, text_key: str) -> str:
    try:
        record = decoded(line)
    except ValueError as error:
        raise RequestError("file", f"{path}, line {number} is no JSON: {error}") from error
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise RequestError("file", f"{path}, line {number} has no text under {text_key!r}; see --text-key")
    return text
