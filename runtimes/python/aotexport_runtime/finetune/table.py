"""Tables of examples: scikit-learn's digits, Parquet, JSON lines, text, and the directories of `datasets`."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotexport_runtime.errors import DataInvalid

DIGITS = "digits"
"""The data that scikit-learn has: 1,797 images of handwritten digits, 8 x 8 pixels."""

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Table:
    """Columns of the same number of rows, by name; `source` says where they are from, for messages.

    `held_out` are rows that the source itself keeps for validation.
    """

    source: str
    columns: Columns
    held_out: Columns | None = None

    def texts(self) -> list[str]:
        """Return the names of the columns of text."""
        return [name for name, values in self.columns.items() if isinstance(values[0], str)]

    def column(self, name: str) -> Sequence[Any]:
        """Return a column; `DataInvalid`: there is none of this name."""
        if name not in self.columns:
            raise DataInvalid(f"{self.source} has no column `{name}`; it has {listed(self.columns)}")
        return self.columns[name]


def listed(names: Any) -> str:
    """Return names for a message."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def read_table(source: str) -> Table:
    """Read examples: `digits`, a file (`.parquet`, `.jsonl`, `.csv`, `.txt`), or a directory.

    The directory is one that `datasets` has written (`save_to_disk`), or that holds Parquet files. `DataInvalid`: it
    cannot be read, has no rows, or a package for it is missing.
    """
    if source == DIGITS:
        return _digits()
    path = Path(source)
    if not path.exists():
        raise DataInvalid(f"--data: there is no file or directory {source!r}; or write `{DIGITS}`")
    if path.is_dir():
        return _directory(path)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise DataInvalid(f"--data: {path} is of no known kind; there are {', '.join(_READERS)}, and directories")
    return _checked(source, read(path))


def _checked(source: str, columns: Columns, held_out: Columns | None = None) -> Table:
    if not columns or not len(next(iter(columns.values()))):
        raise DataInvalid(f"--data: {source} has no rows")
    return Table(source, columns, held_out)


def _digits() -> Table:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise DataInvalid(f"--data {DIGITS} needs scikit-learn: pip install 'aotexport-runtime[finetune]'") from None
    data: Any = datasets.load_digits()
    return Table(DIGITS, {"image": data.images.astype("float32") / 16, "label": data.target})


def _json_lines(path: Path) -> Columns:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise DataInvalid(f"{path}, line {number}: no JSON: {error}") from None
        if not isinstance(row, dict) or (rows and row.keys() != rows[0].keys()):
            wanted = f"an object with {listed(rows[0])}" if rows else "an object"
            raise DataInvalid(f"{path}, line {number}: expected {wanted}")
        rows.append(row)
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, count in Counter(name for name, _ in pairs).most_common(1):
        if count > 1:
            raise ValueError(f"an object has `{name}` twice")
    return dict(pairs)


def _utf8(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataInvalid(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from None


def _csv(path: Path) -> Columns:
    arrow = _pyarrow()
    lines = arrow.csv.ParseOptions(newlines_in_values=True)
    return _of_arrow(lambda: arrow.csv.read_csv(path, parse_options=lines), path)


def _parquet(*paths: Path) -> Columns:
    arrow = _pyarrow()
    return _of_arrow(lambda: arrow.concat_tables([arrow.parquet.read_table(path) for path in paths]), paths[0])


def _arrow(directory: Path) -> Columns:
    arrow = _pyarrow()

    def read(path: Path) -> Any:
        with arrow.memory_map(str(path)) as stream:
            return arrow.ipc.open_stream(stream).read_all()

    try:
        files = [entry["filename"] for entry in json.loads((directory / "state.json").read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataInvalid(f"--data: {directory} is no directory of `Dataset.save_to_disk`") from None
    return _of_arrow(lambda: arrow.concat_tables([read(directory / name) for name in files]), directory)


def _of_arrow(read: Callable[[], Any], path: Path) -> Columns:
    try:
        return read().to_pydict()
    except (OSError, _pyarrow().ArrowException) as error:
        raise DataInvalid(f"--data: {path} cannot be read: {str(error).splitlines()[0]}") from None


def _pyarrow() -> Any:
    try:
        for part in ("csv", "parquet"):
            importlib.import_module(f"pyarrow.{part}")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise DataInvalid(
            "--data: Parquet, CSV and `datasets` need pyarrow: pip install 'aotexport-runtime[finetune]'"
        ) from None


def _directory(path: Path) -> Table:
    if (path / "state.json").is_file():
        return _checked(str(path), _arrow(path))
    if (path / "dataset_dict.json").is_file():
        splits = [name for name in ("validation", "test") if (path / name).is_dir()]
        return _checked(str(path), _arrow(path / "train"), _arrow(path / splits[0]) if splits else None)
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise DataInvalid(f"--data: {path} holds neither Parquet files nor what `Dataset.save_to_disk` writes")
    return _checked(str(path), _parquet(*files))


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".txt": lambda path: {"text": [_utf8(path)]},
}
