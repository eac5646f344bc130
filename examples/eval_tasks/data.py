"""The data of these tasks: files beside this one, in the form that lm-evaluation-harness asks for."""

import json
from pathlib import Path
from typing import Any

import datasets

FOLDER = Path(__file__).parent


def lines(**_options: Any) -> dict[str, datasets.Dataset]:
    """Three lines of a play, four lines that could follow, and which of them does."""
    records = (FOLDER / "next_line.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(record) for record in records])}


def speech(**_options: Any) -> dict[str, datasets.Dataset]:
    """One text."""
    text = (FOLDER / "julius_caesar.txt").read_text(encoding="utf-8")
    return {"test": datasets.Dataset.from_list([{"text": text}])}
