"""The curve of a run: lines of JSON, TensorBoard events, and a picture."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from aotexport_runtime.bundle.directory import open_regular
from aotexport_runtime.errors import DataInvalid

FILE = "history.jsonl"
PICTURE = "curves.png"
Entry = dict[str, Any]
"""`step` counts finished steps. Of a step: `loss`, `lr`, `examples_per_s`; of an epoch: `epoch`, `train_loss`,
`validation_loss`, and `accuracy` or `perplexity` of the examples held out."""


class History:
    """The entries of a run, in a file that grows with it."""

    def __init__(self, directory: Path, *, steps: int, tensorboard: bool = False, writes: bool = True) -> None:
        """Begin after the first `steps` steps of an interrupted run, or anew; `tensorboard`: write its events too.

        `DataInvalid`: the package tensorboard is missing.
        """
        self.entries: list[Entry] = read(directory / FILE, steps) if steps else []
        self._writer = _writer(directory, steps) if tensorboard else None
        if writes:
            (directory / FILE).unlink(missing_ok=True)  # A link would lead elsewhere.
        self._file: IO[str] = (directory / FILE).open("x", encoding="utf-8") if writes else io.StringIO()
        for entry in self.entries:
            self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def add(self, entry: Entry) -> None:
        """Add an entry; it is in the file when this returns."""
        self.entries.append(entry)
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in entry.items():
                if name not in ("step", "epoch"):
                    self._writer.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    @property
    def epochs(self) -> list[Entry]:
        """The entries of epochs."""
        return [entry for entry in self.entries if "epoch" in entry]


_KEYS = ({"step", "loss", "lr"}, {"step", "epoch", "train_loss"})
_LONGEST = 1 << 16


def read(path: Path, steps: int) -> list[Entry]:
    """Return the entries of a file up to a step; a line that is none, as one that a crash has cut, ends them."""
    entries: list[Entry] = []
    with contextlib.suppress(OSError), open_regular(path) as file:
        while line := file.readline(_LONGEST):
            try:
                entry = json.loads(line)
                sum(entry.values(), 0.0)  # numbers alone
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                break
            if not any(entry.keys() >= keys for keys in _KEYS):
                break
            entries.append(entry)
    return [entry for entry in entries if entry["step"] <= steps]


def _writer(directory: Path, steps: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise DataInvalid(
            "--tensorboard needs the package tensorboard: pip install 'aotexport-runtime[finetune]'"
        ) from None
    make: Callable[..., Any] = SummaryWriter
    return make(str(directory), purge_step=steps + 1 if steps else None)


def draw(entries: Sequence[Entry], path: Path, title: str) -> bool:
    """Draw the curves as a PNG; return False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = [entry for entry in entries if "loss" in entry]
    epochs = [entry for entry in entries if "epoch" in entry]
    above.plot(
        [e["step"] for e in steps], [e["loss"] for e in steps], color="0.75", linewidth=0.8, label="loss of a step"
    )
    _curve(above, epochs, "train_loss", "training loss")
    _curve(above, epochs, "validation_loss", "validation loss")
    above.set_ylabel("loss")
    if any("accuracy" in entry for entry in epochs):
        right = above.twinx()
        _curve(right, epochs, "accuracy", "accuracy", color="tab:green")
        right.set_ylabel("accuracy", color="tab:green")
        right.set_ylim(0, 1.02)
    above.legend(loc="center right")
    below.plot([e["step"] for e in steps], [e["lr"] for e in steps], color="tab:gray")
    below.set_ylabel("learning rate")
    below.set_xlabel("step")
    figure.suptitle(title)
    path.unlink(missing_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return True


def _curve(axes: Any, epochs: Sequence[Entry], key: str, label: str, **style: Any) -> None:
    own = [entry for entry in epochs if key in entry]
    if own:
        axes.plot([e["step"] for e in own], [e[key] for e in own], marker="o", markersize=3, label=label, **style)
