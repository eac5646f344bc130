"""Recipe: everything that determines the trained weights, read from a TOML file; TrainConfig: one run of it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jhybrid.errors import ConfigError

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class TrainConfig:
    """One run of a recipe."""

    corpus: str
    """Source archive (.tar.gz), directory of text files, or one text file."""
    output: str
    """Directory of the checkpoint; the engine can load it from the first save on."""
    preset: str = "demo"
    """Name of a recipe that comes with the package, or the path of a TOML file."""
    steps: int | None = None
    """Train for this many steps instead of the recipe's; the schedule of the learning rate moves with it."""
    resume: bool = False
    """Continue from the last save in `output`; the result equals that of an uninterrupted run."""
    save_every: int = 100
    """Steps between saves, with a quick held-out measurement each."""
    json: bool = False
    """Print one JSON object per line instead of a progress bar."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError("steps", f"must be at least 1, got {self.steps}")
        if self.save_every < 1:
            raise ConfigError("save_every", f"must be at least 1, got {self.save_every}")


@dataclass(frozen=True)
class Recipe:
    """What is trained on what, and how. Two runs of one recipe on one machine give the same weights."""

    pattern: str  # glob on the corpus's file names
    heldout: tuple[str, ...]  # works kept out of training
    vocab_size: int
    model: Mapping[str, Any]  # config.json of the model, in Hugging Face's form; vocab_size is filled in
    published: Mapping[str, Any]  # keys that differ in the config.json that is saved
    seed: int
    steps: int
    batch: int  # sequences of one step
    length: int  # tokens of a sequence
    learning_rate: float  # at its peak
    warmup: int  # steps of linear rise
    decay: float  # share of the steps over which it falls linearly to 0, at the end
    weight_decay: float
    clip: float  # largest norm of a gradient

    def __post_init__(self) -> None:
        for name in ("vocab_size", "steps", "batch", "length"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.decay <= 1.0:
            raise ConfigError("decay", f"{self.decay} is not in (0, 1]")

    @property
    def decay_start(self) -> int:
        """First step whose learning rate is below the peak again."""
        return self.steps - max(1, round(self.steps * self.decay))

    @classmethod
    def read(cls, preset: str) -> "Recipe":
        """By preset name or TOML path. Raises ConfigError naming missing, unknown and ill-typed keys."""
        path = Path(preset) if preset.endswith(".toml") else PRESETS / f"{preset}.toml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in PRESETS.glob("*.toml")))
            raise ConfigError("preset", f"{preset!r} is neither a .toml file nor one of: {known}")
        with path.open("rb") as file:
            try:
                raw = tomllib.load(file)
            except tomllib.TOMLDecodeError as error:
                raise ConfigError("preset", f"{path} is no TOML: {error}") from error
        flat = raw.pop("corpus", {}) | raw.pop("run", {}) | raw
        known = {f.name for f in fields(cls)}
        if flat.keys() != known:
            missing, unknown = sorted(known - flat.keys()), sorted(flat.keys() - known)
            raise ConfigError("preset", f"{path} lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}")
        return cls(**flat | {"heldout": tuple(flat["heldout"])})
