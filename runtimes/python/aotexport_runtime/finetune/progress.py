"""Progress of training on standard error: a bar, or a line per epoch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table

_SMOOTHING = 0.9
_HEADINGS = {
    "epoch": "epoch",
    "step": "step",
    "train_loss": "training loss",
    "validation_loss": "validation loss",
    "accuracy": "accuracy",
    "perplexity": "perplexity",
}


class TrainingProgress:
    """Shows the entries of a run as they come."""

    def __init__(self, *, quiet: bool, steps: int, epochs: int, done: int) -> None:
        """Show nothing yet, of `steps` in `epochs`, of which an interrupted run has `done` some."""
        self._console = Console(file=sys.stderr, highlight=False, markup=False)
        self._quiet = quiet
        self._steps, self._epochs, self._done = steps, epochs, done
        self._smooth: dict[str, float] = {}
        self._bar: bars.Progress | None = None

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """Say what begins, and show the bar on a terminal."""
        if self._quiet:
            return
        self._console.print(what, soft_wrap=True)
        if self._console.is_terminal:
            self._bar = bars.Progress(
                bars.TextColumn("epoch {task.fields[epoch]}/" + str(self._epochs)),
                bars.BarColumn(bar_width=None),
                bars.MofNCompleteColumn(),
                bars.TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[speed]} examples/s"),
                bars.TimeRemainingColumn(),
                console=self._console,
                expand=True,
            )
            self._bar.add_task("", total=self._steps, completed=self._done, epoch=1, loss="-", lr="-", speed="-")
            self._bar.start()

    def told(self, entry: dict[str, Any]) -> None:
        """Show an entry of the history."""
        if self._quiet:
            return
        if "epoch" in entry:
            words = [f"{head} {_number(key, entry[key])}" for key, head in _HEADINGS.items() if key in entry][2:]
            self._console.print(f"epoch {entry['epoch']}: {', '.join(words)}", soft_wrap=True)
        elif self._bar is not None:
            for key in ("loss", "examples_per_s"):
                before = self._smooth.setdefault(key, entry[key])
                self._smooth[key] = _SMOOTHING * before + (1 - _SMOOTHING) * entry[key]
            self._bar.update(
                self._bar.task_ids[0],
                completed=entry["step"],
                epoch=-(-entry["step"] * self._epochs // self._steps),
                loss=f"{self._smooth['loss']:.4f}",
                lr=f"{entry['lr']:.2e}",
                speed=f"{self._smooth['examples_per_s']:,.0f}",
            )


def _number(key: str, value: float) -> str:
    if key == "accuracy":
        return f"{value:.2%}"
    return str(value) if isinstance(value, int) else f"{value:.4f}" if key != "perplexity" else f"{value:.2f}"


def epochs_table(epochs: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the entries of epochs."""
    keys = [key for key in _HEADINGS if any(key in entry for entry in epochs)]
    table = Table(box=None, pad_edge=False)
    for key in keys:
        table.add_column(_HEADINGS[key], justify="right")
    for entry in epochs:
        table.add_row(*(_number(key, entry[key]) if key in entry else "" for key in keys))
    return table
