"""A profile as a picture: step time against batch, against depth, and of prefill, each with its floor drawn in."""

import importlib.util
from pathlib import Path

import numpy as np

from jhybrid.errors import ConfigError
from jhybrid.profiler.run import Profile, Row

FORMATS = (".png", ".svg", ".pdf")


def has_matplotlib() -> bool:
    """Whether plots can be made here."""
    return importlib.util.find_spec("matplotlib") is not None


def check_plot(path: Path) -> None:
    """Raises ConfigError where no picture can be made of this path's format, or none at all."""
    if path.suffix not in FORMATS:
        raise ConfigError("plot", f"{path} ends in none of {', '.join(FORMATS)}")
    if not has_matplotlib():
        raise ConfigError("plot", "needs matplotlib; pip install 'jhybrid[plot]'")


def plot_profile(profile: Profile, path: Path) -> None:
    """Write the picture in the format that the path's ending says. Raises ConfigError if that fails."""
    check_plot(path)
    from matplotlib.figure import Figure

    decode = [row for row in profile.measured if row["kind"] == "decode"]
    prefill = [row for row in profile.measured if row["kind"] == "prefill"]
    figure = Figure(figsize=(16, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _panel(left, decode, "batch", "depth", "decode: sequences", "depth")
    _panel(middle, decode, "depth", "batch", "decode: tokens of context", "batch")
    _panel(right, prefill, "new", "cached", "prefill: new tokens", "cached")
    head = profile.head
    figure.suptitle(
        f"{Path(head['model']['model']).name}, {head['machine']['cpu'] or head['machine']['device']}, {_kv(profile)}"
    )
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError("plot", f"{path} cannot be written: {error}; run it again with another --plot") from error


def _kv(profile: Profile) -> str:
    return {"real": "real caches", "synthetic": "synthetic caches"}[profile.head["profile"]["seed"]]


def _panel(axes, rows: list[Row], across: str, by: str, label: str, key: str) -> None:
    """A line for each value of `by`, with the range of its repeats, and its floor, dashed, in the same colour."""
    for i, value in enumerate(sorted({row[by] for row in rows})):
        line = sorted((row for row in rows if row[by] == value), key=lambda row: row[across])
        at = [row[across] for row in line]
        middle, floor = (np.array([row[name] for row in line]) * 1e3 for name in ("seconds", "floor_seconds"))
        low, high = np.array([row["spread"] for row in line]).T * 1e3
        ranges, colour = [middle - low, high - middle], f"C{i}"
        axes.errorbar(at, middle, ranges, marker="o", markersize=4, capsize=2, color=colour, label=f"{key} {value}")
        axes.plot(at, floor, "--", linewidth=1, color=colour, alpha=0.6)
    axes.set(xlabel=label, ylabel="ms", xscale="log", yscale="log")
    axes.grid(True, alpha=0.2)
    if rows:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.plot([], [], "--", color="grey", label="bandwidth floor")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        ticks = sorted({row[across] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
