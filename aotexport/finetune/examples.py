"""Examples: rows of a table as the tensors that a bundle takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from aotexport.errors import DataInvalid
from aotexport.finetune.losses import FIRST, IGNORED, SECOND, TARGET
from aotexport.finetune.model import OWN_TARGET, Batch, Model
from aotexport.finetune.settings import Settings
from aotexport.finetune.table import Columns, Table, listed
from aotexport_runtime.serving.interface import TensorSpec
from aotexport_runtime.values import dtypes

_TARGETS = ("label", "labels", "target", "class")
_TEXT = "text"
"""What `--column` calls the text, and the column of it by default."""
_PAIRS = (("anchor", "positive"), ("sentence1", "sentence2"), ("query", "answer"))


@dataclass(frozen=True)
class Examples:
    """Rows as tensors, by the name of the input; rows may differ in the size of their first axis.

    Attributes:
        padding: what fills up short ones, by name; 0 where it says none.
        classes: names of the classes, where the data names them.
        rows: rows of the data that they were made of, from 1; empty where they are pieces of several.
        note: what differs from what was asked for, for people.
    """

    columns: Mapping[str, Sequence[torch.Tensor]]
    padding: Mapping[str, int]
    classes: tuple[str, ...] = ()
    rows: Sequence[int] = ()
    note: str | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def batch(self, rows: Sequence[int], device: torch.device) -> Batch:
        """Return the rows as one tensor per input; short ones are filled up to the longest."""
        return {
            name: _joined([values[row] for row in rows], self.padding.get(name, 0)).to(device)
            for name, values in self.columns.items()
        }

    def not_finite(self, rows: Sequence[int]) -> str:
        """Return which row of the data holds an infinite number or none, after a colon; empty: none of `rows` does."""
        found = [row for row in rows if any(not values[row].isfinite().all() for values in self.columns.values())]
        return f": row {self.rows[found[0]]} of the data holds one that is not finite" if found else ""


def _joined(rows: Sequence[torch.Tensor], padding: int) -> torch.Tensor:
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(list(rows))
    return pad_sequence(list(rows), batch_first=True, padding_value=padding)


def examples_of(table: Table, model: Model, settings: Settings, tokenizer: str | None) -> tuple[Examples, Examples]:
    """Return the examples to train on, and those that are held out.

    `DataInvalid`: the table does not fit the bundle or the loss.
    """
    make = _Maker(table, model, settings, tokenizer)
    everything = make.examples(table.columns)
    if table.held_out is not None:
        return everything, make.examples(table.held_out)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    held_out = round(settings.validation * len(order))
    if held_out == len(order):
        raise DataInvalid(f"{table.source} gives {len(order)} examples, too few to hold some out: --validation 0")
    return _rows(everything, order[held_out:]), _rows(everything, order[:held_out])


def _rows(examples: Examples, rows: Sequence[int]) -> Examples:
    columns = {name: [values[row] for row in rows] for name, values in examples.columns.items()}
    numbers = [examples.rows[row] for row in rows] if examples.rows else ()
    return replace(examples, columns=columns, rows=numbers)


class _Maker:
    """Makes examples of the columns of one table."""

    def __init__(self, table: Table, model: Model, settings: Settings, tokenizer: str | None) -> None:
        self._table = table
        self._inputs = {name: spec for name, spec in model.inputs.items() if name != OWN_TARGET}
        self._model, self._own_target = model, model.inputs.get(OWN_TARGET)
        self._note: str | None = None
        self._settings = settings
        self._source = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._padding = {TARGET: IGNORED, OWN_TARGET: IGNORED}

    def examples(self, columns: Columns) -> Examples:
        table = Table(self._table.source, columns)
        absent = [column for column in dict(self._settings.columns).values() if column not in columns]
        if absent:
            raise DataInvalid(f"--column: {table.source} has no column {listed(absent)}; it has {listed(columns)}")
        self._check_own_target()
        make = {"classification": self._classification, "causal-lm": self._pieces, "pairs": self._pairs}
        made, classes = make[self._settings.loss](table)
        rows = () if self._settings.loss == "causal-lm" else range(1, len(next(iter(made.values()))) + 1)
        return Examples(made, self._padding, classes, rows, self._note)

    def _check_own_target(self) -> None:
        """Refuse a loss of the bundle's own that takes other labels than those that the data gives."""
        spec, classes = self._own_target, self._settings.loss == "classification"
        if spec is None or self._settings.loss == "pairs":
            return
        alike = len(spec.shape) == (1 if classes else 2) and dtypes.dtype(spec.dtype) == torch.int64
        if not alike or not (classes or self._model.size(spec, 1) == self._model.size(self._ids(), 1)):
            given = "a class per example" if classes else "the tokens that it reads"
            shape = ["examples", *(size if size >= 0 else "any" for size in spec.shape[1:])]
            raise DataInvalid(
                f"the bundle's own loss takes `{OWN_TARGET}` of {spec.dtype} [{', '.join(map(str, shape))}], and "
                f"--loss {self._settings.loss} gives it {given}. Classes of tokens, answers to texts "
                "and numbers need a loop of your own: `aotexport_runtime.load`"
            )

    # --- kinds of examples --------------------------------------------------------------------------------

    def _classification(self, table: Table) -> tuple[dict[str, Sequence[torch.Tensor]], tuple[str, ...]]:
        target = self._settings.target or next((name for name in _TARGETS if name in table.columns), None)
        if target is None:
            raise DataInvalid(
                f"{table.source} has no column of classes; choose one: --target of {listed(table.columns)}"
            )
        labels, classes = _classes(self._table.column(target), table.column(target), target)
        others = Table(table.source, {name: values for name, values in table.columns.items() if name != target})
        made = self._values(others)
        made[TARGET] = labels
        if self._own_target is not None:
            made[OWN_TARGET] = labels
        return made, classes

    def _pieces(self, table: Table) -> tuple[dict[str, Sequence[torch.Tensor]], tuple[str, ...]]:
        text = self._text_column(table)
        tokens = torch.tensor([t for each in self._tokens(table.column(text), text, marked=False) for t in each])
        length = self._length()
        pieces = list(tokens[: len(tokens) // length * length].view(-1, length))
        if not pieces:
            raise DataInvalid(f"{table.source} has {len(tokens)} tokens, less than one piece of {length}: --length")
        made = self._of_tokens(pieces)
        made[TARGET if self._own_target is None else OWN_TARGET] = pieces
        return made, ()

    def _pairs(self, table: Table) -> tuple[dict[str, Sequence[torch.Tensor]], tuple[str, ...]]:
        known = next((pair for pair in _PAIRS if set(pair) <= table.columns.keys()), None)
        names = known or tuple(table.texts()[:2])
        if len(names) < 2:
            raise DataInvalid(
                f"{table.source} has no two columns of text, as pairs need; it has {listed(table.columns)}"
            )
        made: dict[str, Sequence[torch.Tensor]] = {}
        for prefix, name in zip((FIRST, SECOND), names, strict=True):
            side = self._of_tokens(self._cut(table.column(name), name))
            made.update({prefix + key: values for key, values in side.items()})
            self._padding.update({prefix + key: self._padding.get(key, 0) for key in side})
        return made, ()

    # --- inputs -------------------------------------------------------------------------------------------

    def _values(self, table: Table) -> dict[str, Sequence[torch.Tensor]]:
        """Return each input's values: of the column of its name, of the only column, or of text."""
        columns, texts = dict(self._settings.columns), table.texts()
        unknown = columns.keys() - self._inputs.keys() - {_TEXT}
        if unknown:
            raise DataInvalid(f"--column: the bundle has no input {listed(unknown)}; it has {listed(self._inputs)}")
        named = {name: columns.get(name, name) for name in self._inputs}
        if len(named) == 1 and len(table.columns) == 1:
            named = dict.fromkeys(named, next(iter(table.columns)))
        missing = [name for name, column in named.items() if column not in table.columns]
        text = next((column for column in named.values() if column in texts), None)
        if _TEXT in columns or (text is None and missing and texts):
            text = self._text_column(table)
        if text is not None:
            return self._of_tokens(self._cut(table.column(text), text))
        if missing:
            raise DataInvalid(
                f"{table.source} has no column for input {listed(missing)}; name one: "
                f"--column {missing[0]}=COLUMN, of {listed(table.columns)}"
            )
        return {
            name: [_value(spec, value, named[name], row) for row, value in enumerate(table.column(named[name]), 1)]
            for name, spec in self._inputs.items()
        }

    def _text_column(self, table: Table) -> str:
        texts, columns = table.texts(), dict(self._settings.columns)
        wanted = columns.get(_TEXT, _TEXT)
        if wanted in texts or (len(texts) == 1 and _TEXT not in columns):
            return wanted if wanted in texts else texts[0]
        raise DataInvalid(f"{table.source}: which column is the text? --column text=COLUMN, of {listed(texts)}")

    # --- tokens -------------------------------------------------------------------------------------------

    def _tokens(self, texts: Sequence[str], column: str, *, marked: bool) -> list[list[int]]:
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self._source, f"column `{column}` of {self._table.source}")
            self._padding["input_ids"] = self._tokenizer.padding
        return self._tokenizer.tokens(texts, marked=marked)

    def _cut(self, texts: Sequence[str], column: str) -> list[torch.Tensor]:
        """Return the tokens of each text, cut at the greatest length."""
        length = self._length()
        cut = [
            ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
            for ids in self._tokens(texts, column, marked=True)
        ]
        return [torch.tensor(ids, dtype=torch.int64) for ids in cut]

    def _length(self) -> int:
        """Return the number of tokens to cut at: as asked for, or the nearest that the bundle takes."""
        (least, most), wanted = self._model.sizes_of(self._ids(), 1), self._settings.length
        length = min(max(wanted, least), most or wanted)
        if length != wanted:
            self._note = f"texts are cut at {length} tokens, as the bundle needs, and not at --length {wanted}"
        return length

    def _ids(self) -> TensorSpec:
        for name in ("input_ids", *self._inputs):
            spec = self._inputs.get(name)
            if spec is not None and len(spec.shape) == 2 and dtypes.dtype(spec.dtype) == torch.int64:
                return spec
        raise DataInvalid(f"the bundle takes no tokens [examples, tokens]; its inputs are {listed(self._inputs)}")

    def _of_tokens(self, tokens: Sequence[torch.Tensor]) -> dict[str, Sequence[torch.Tensor]]:
        """Return the inputs that tokens give: themselves, their mask, and the types 0 of a single text."""
        ids, least = self._ids().name, max(self._model.sizes_of(self._ids(), 1)[0], 1)
        masks = [torch.ones_like(each) for each in tokens]
        padding = 0 if self._tokenizer is None else self._tokenizer.padding
        short = [max(0, least - len(each)) for each in tokens]
        tokens = [torch.nn.functional.pad(each, (0, n), value=padding) for each, n in zip(tokens, short, strict=True)]
        masks = [torch.nn.functional.pad(each, (0, n)) for each, n in zip(masks, short, strict=True)]
        made: dict[str, Sequence[torch.Tensor]] = {ids: tokens}
        self._padding[ids] = padding
        for name, spec in self._inputs.items():
            if name.endswith("attention_mask"):
                made[name] = [each.to(dtypes.dtype(spec.dtype)) for each in masks]
            elif name.endswith("token_type_ids"):
                made[name] = [torch.zeros_like(each) for each in tokens]
            elif name != ids:
                raise DataInvalid(f"text gives no values for input `{name}` of the bundle; use a table that has them")
        return made


def _classes(
    everything: Sequence[Any], values: Sequence[Any], column: str
) -> tuple[list[torch.Tensor], tuple[str, ...]]:
    """Return a class per row, and the names of the classes."""
    if isinstance(everything[0], str):
        names = sorted(set(everything))
        number = {name: index for index, name in enumerate(names)}
        unknown = next((value for value in values if value not in number), None)
        if unknown is not None:
            raise DataInvalid(f"column `{column}`: class {unknown!r} is in the held-out rows alone")
        return [torch.tensor(number[value]) for value in values], tuple(names)
    for row, value in enumerate(values, start=1):
        if isinstance(value, bool | float) or not hasattr(value, "__index__") or value < 0:
            raise DataInvalid(f"column `{column}`, row {row}: expected a class (0, 1, ...) or its name, got {value!r}")
    return [torch.tensor(int(value)) for value in values], ()


def _value(spec: TensorSpec, value: Any, column: str, row: int) -> torch.Tensor:
    """Return the value of a row in the shape that the input has beside the batch."""
    shape = spec.shape[1:]
    try:
        tensor = torch.as_tensor(value).to(dtypes.dtype(spec.dtype))
    except (TypeError, ValueError, RuntimeError):
        raise DataInvalid(f"column `{column}`, row {row}: expected numbers, got {str(value)[:40]!r}") from None
    if all(size >= 0 for size in shape) and tensor.numel() == torch.Size(shape).numel():
        return tensor.view(shape)
    if len(shape) == tensor.dim() and all(want in (-1, has) for want, has in zip(shape, tensor.shape, strict=True)):
        return tensor
    wanted = [size if size >= 0 else "any" for size in shape]
    raise DataInvalid(f"column `{column}`, row {row}: {list(tensor.shape)} values; input `{spec.name}` takes {wanted}")


BYTES = "bytes"
"""The tokenizer whose tokens are the bytes of UTF-8."""


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts to the tokens of each, `marked` with those that mark begin and end.

    `padding` is the token that fills up short texts.
    """

    tokens: Callable[..., list[list[int]]]
    padding: int = 0


def tokenizer_of(source: str | None, need: str) -> Tokenizer:
    """Return a tokenizer of a `tokenizer.json`, or of `bytes`; `need` is what needs it, for messages.

    `DataInvalid`: there is none, it cannot be read, or the library is missing.
    """
    if source is None:
        raise DataInvalid(f"{need} is text: give the model's tokenizer (--tokenizer tokenizer.json, or bytes)")
    if source == BYTES:
        return Tokenizer(lambda texts, *, marked: [list(text.encode()) for text in texts])
    try:
        import tokenizers
    except ImportError:
        raise DataInvalid("--tokenizer needs the library tokenizers: pip install 'aotexport[finetune]'") from None
    try:
        loaded = tokenizers.Tokenizer.from_file(source)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise DataInvalid(f"--tokenizer: {source} cannot be read: {str(error).splitlines()[0]}") from None
    padding = (loaded.padding or {}).get("pad_id", 0)
    loaded.no_padding()
    loaded.no_truncation()

    def tokens(texts: Sequence[str], *, marked: bool) -> list[list[int]]:
        return [encoding.ids for encoding in loaded.encode_batch(list(texts), add_special_tokens=marked)]

    return Tokenizer(tokens, padding)
