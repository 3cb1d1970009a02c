"""Progress of training on standard error: a bar, or a line per epoch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

_SMOOTHING = 0.9
_HEADINGS = {
    "epoch": "epoch",
    "step": "step",
    "train_loss": "training loss",
    "validation_loss": "validation loss",
    "accuracy": "accuracy",
    "perplexity": "perplexity",
}


class TrainingProgress(contextlib.ExitStack):
    """Shows the entries of a run as they come; a context."""

    def __init__(self, *, quiet: bool, steps: int, epochs: int, done: int) -> None:
        """Show nothing yet, of `steps` in `epochs`, of which an interrupted run has `done` some."""
        super().__init__()
        self._quiet, self._steps, self._epochs, self._done = quiet, steps, epochs, done
        self._smooth: dict[str, float] = {}
        self._bar: Any = None

    def begin(self, what: str) -> None:
        """Say what begins, and show the bar on a terminal."""
        if self._quiet:
            return
        click.echo(what, err=True)
        if sys.stderr.isatty():
            bar = click.progressbar(length=self._steps, item_show_func=str, show_pos=True, file=sys.stderr)
            self._bar = self.enter_context(bar)
            self._bar.update(self._done)

    def told(self, entry: dict[str, Any]) -> None:
        """Show an entry of the history."""
        if self._quiet:
            return
        if "epoch" in entry:
            words = [f"{head} {_number(key, entry[key])}" for key, head in _HEADINGS.items() if key in entry][2:]
            erased = "" if self._bar is None else "\r\033[K"
            click.echo(f"{erased}epoch {entry['epoch']}: {', '.join(words)}", err=True)
        elif self._bar is not None:
            for key in ("loss", "examples_per_s"):
                before = self._smooth.setdefault(key, entry[key])
                self._smooth[key] = _SMOOTHING * before + (1 - _SMOOTHING) * entry[key]
            epoch = -(-entry["step"] * self._epochs // self._steps)
            self._bar.update(
                entry["step"] - self._bar.pos,
                f"epoch {epoch}/{self._epochs}  loss {self._smooth['loss']:.4f}  lr {entry['lr']:.2e}  "
                f"{self._smooth['examples_per_s']:,.0f} examples/s",
            )


def _number(key: str, value: float) -> str:
    if key == "accuracy":
        return f"{value:.2%}"
    return str(value) if isinstance(value, int) else f"{value:.4f}" if key != "perplexity" else f"{value:.2f}"


def epochs_table(epochs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the entries of epochs as rows of text, headings first."""
    keys = [key for key in _HEADINGS if any(key in entry for entry in epochs)]
    yield [_HEADINGS[key] for key in keys]
    for entry in epochs:
        yield [_number(key, entry[key]) if key in entry else "" for key in keys]
