"""Progress of a training run: a rich progress bar, or JSON lines for programs."""

import json
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class JsonProgress:
    """One JSON object per event on stdout."""

    def __enter__(self) -> "JsonProgress":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        self.event("step", step=step, loss=loss)

    def event(self, name: str, **values: Any) -> None:
        """Anything else worth a line."""
        sys.stdout.write(json.dumps({"event": name, **values}) + "\n")
        sys.stdout.flush()


class BarProgress:
    """A bar with the loss; events are printed above it."""

    def __init__(self, steps: int):
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._bar.add_task("train", total=steps, loss=float("nan"))

    def __enter__(self) -> "BarProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        self._bar.update(self._task, completed=step, loss=loss)

    def event(self, name: str, **values: Any) -> None:
        """Anything else worth a line."""
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        self._bar.console.print(f"{name}: {shown}")
