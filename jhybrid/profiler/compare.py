"""Compare: two profiles point by point, with their spread taken into account."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from jhybrid.profiler.run import Profile, Row

Verdict = Literal["slower", "faster", "within spread"]
LEAST = 3  # repeats that have a spread worth the name
VERDICTS: tuple[Verdict, ...] = ("slower", "faster", "within spread")


@dataclass(frozen=True)
class Pair:
    """One point in both. `ratio` is B's median over A's; beyond 1 B is slower."""

    point: str
    a: Row
    b: Row

    @property
    def ratio(self) -> float:
        return self.b["seconds"] / self.a["seconds"]

    @property
    def verdict(self) -> Verdict:
        """Different only if every repeat of one is beyond every repeat of the other, and there are at least three."""
        if min(self.a["repeats"], self.b["repeats"]) < LEAST:
            return "within spread"
        (a_low, a_high), (b_low, b_high) = self.a["spread"], self.b["spread"]
        if b_low > a_high:
            return "slower"
        return "faster" if b_high < a_low else "within spread"


@dataclass(frozen=True)
class Comparison:
    """Points of both, points that only one of them measured, and what their configurations differ in."""

    pairs: list[Pair]
    only_a: list[str]
    only_b: list[str]
    differing: dict[str, tuple[Any, Any]]

    @property
    def ratio(self) -> float | None:
        """Geometric mean of the pairs' ratios."""
        if not self.pairs:
            return None
        return math.exp(sum(math.log(pair.ratio) for pair in self.pairs) / len(self.pairs))

    def count(self, verdict: Verdict) -> int:
        return sum(pair.verdict == verdict for pair in self.pairs)

    def describe(self) -> list[dict[str, Any]]:
        """A JSON object for each pair, and one for all."""
        lines: list[dict[str, Any]] = [
            {
                "point": pair.point,
                "a_seconds": pair.a["seconds"],
                "a_spread": pair.a["spread"],
                "b_seconds": pair.b["seconds"],
                "b_spread": pair.b["spread"],
                "ratio": pair.ratio,
                "verdict": pair.verdict,
            }
            for pair in self.pairs
        ]
        return [
            *lines,
            {
                "pairs": len(self.pairs),
                "ratio": self.ratio,
                "slower": self.count("slower"),
                "faster": self.count("faster"),
                "within_spread": self.count("within spread"),
                "only_a": self.only_a,
                "only_b": self.only_b,
                "differing": self.differing,
            },
        ]


def compare(a: Profile, b: Profile) -> Comparison:
    """B beside A."""
    rows_a = {row["point"]: row for row in a.measured}
    rows_b = {row["point"]: row for row in b.measured}
    return Comparison(
        [Pair(point, row, rows_b[point]) for point, row in rows_a.items() if point in rows_b],
        [point for point in rows_a if point not in rows_b],
        [point for point in rows_b if point not in rows_a],
        _differing(a.head, b.head),
    )


def _differing(a: dict[str, Any], b: dict[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*a, *b}):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found |= _differing(left, right, f"{path}{key}.")
        elif left != right:
            found[path + key] = (left, right)
    return found


def print_comparison(found: Comparison, console: Console) -> None:
    """The same as a table."""
    table = Table("point", "A ms", "B ms", "B/A", "verdict")
    for pair in found.pairs:
        colour = {"slower": "red", "faster": "green"}.get(pair.verdict, "")
        verdict = f"[{colour}]{pair.verdict}[/{colour}]" if colour else pair.verdict
        table.add_row(pair.point, _cell(pair.a), _cell(pair.b), f"{pair.ratio:.3f}", verdict)
    console.print(table)
    for key, (left, right) in found.differing.items():
        console.print(f"{key}: A {left!r}, B {right!r}")
    for name, points in (("A", found.only_a), ("B", found.only_b)):
        if points:
            console.print(f"only {name} has: {', '.join(points)}")
    if found.ratio is None:
        console.print("no point was measured in both")
        return
    counts = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in VERDICTS)
    console.print(f"B/A {found.ratio:.3f}, the geometric mean of {len(found.pairs)} points: {counts} of the repeats")


def _cell(row: Row) -> str:
    """Median and range."""
    low, high = row["spread"]
    return f"{row['seconds'] * 1e3:.2f} ({low * 1e3:.2f} - {high * 1e3:.2f})"
