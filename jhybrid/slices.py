"""Slice: TPU chips that are rented together, as `tpu_configs/*.toml` name them, and what is compiled for without them.

Such a file holds settings of the engine, by the names of its flags, and a table `[slice]` that says for what chips they
are meant. Its `topology` is in the compiler's words, such as "v5e:2x4".
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from jhybrid.errors import ConfigError
from kernels_pallas.chips import CHIPS, Chip

FOLDER = Path(__file__).parent.parent / "tpu_configs"


@dataclass(frozen=True)
class Slice:
    """A topology of one kind of chip."""

    topology: str

    @property
    def chip(self) -> Chip:
        """Raises ConfigError for a kind that is not known."""
        name = self.topology.replace("=", ":").split(":")[0]
        if name not in CHIPS:
            raise ConfigError("topology", f"{self.topology!r} begins with none of {', '.join(CHIPS)}")
        return CHIPS[name]


def read_slice(path: Path) -> Slice | None:
    """What a file's table `[slice]` says; None if it has none. ConfigError for one that cannot be understood."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("slice")
    except (OSError, ValueError) as error:
        raise ConfigError("config", f"{path} cannot be read: {error}") from error
    if table is None:
        return None
    if not isinstance(table, dict) or table.keys() != {"topology"} or not isinstance(table["topology"], str):
        raise ConfigError("slice", f'{table!r} in {path} is not a table with topology = "KIND:SHAPE" alone')
    found = Slice(table["topology"])
    _ = found.chip  # refused here, with the file at hand
    return found
