"""Examples: rows of a table as the tensors that a bundle takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from aotexport_runtime.errors import DataInvalid
from aotexport_runtime.finetune.losses import FIRST, SECOND, TARGET
from aotexport_runtime.finetune.model import OWN_TARGET, POSITIONS, Batch, Model
from aotexport_runtime.finetune.settings import Settings
from aotexport_runtime.finetune.table import Columns, Table, listed
from aotexport_runtime.finetune.targets import IGNORED, Classes, answers_of, has_lists_of_text, of_first_tokens, packed
from aotexport_runtime.finetune.tokenizer import Encoded, Tokenizer
from aotexport_runtime.serving.interface import TensorSpec
from aotexport_runtime.values import dtypes

_TARGETS = ("label", "labels", "target", "class")
_TEXT = "text"
"""What `--column` calls the text, and the column of it by default."""
_BESIDE_TOKENS = ("causal-lm", "completion", "token-classification")
"""Losses that have a target for each token that the bundle reads."""
_PAIRS = (("anchor", "positive"), ("sentence1", "sentence2"), ("query", "answer"))


@dataclass(frozen=True)
class Examples:
    """Rows as tensors.

    Attributes:
        columns: tensors per row, by the name of the input; rows may differ in the size of their first axis.
        padding: what fills up short ones, by name; 0 where it says none.
        classes: names of the classes, where the data names them.
        rows: rows of the data that they were made of, from 1; empty where they are pieces of several.
        notes: what differs from what was asked for, for people.
    """

    columns: Mapping[str, Sequence[torch.Tensor]]
    padding: Mapping[str, int]
    classes: tuple[str, ...] = ()
    rows: Sequence[int] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values())))

    def batch(self, rows: Sequence[int], device: torch.device) -> Batch:
        """Return the rows as one tensor per input; short ones are filled up to the longest."""
        return {
            name: _joined([values[row] for row in rows], self.padding.get(name, 0)).to(device)
            for name, values in self.columns.items()
        }

    def weight(self, rows: Sequence[int]) -> int:
        """Return the number of targets of the rows: of examples, or of tokens that have one."""
        targets = self.columns.get(TARGET)
        if targets is None or not targets[0].dim() or targets[0].is_floating_point():
            return len(rows)
        return sum(int((targets[row] != IGNORED).sum()) for row in rows)

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
    def __init__(self, table: Table, model: Model, settings: Settings, tokenizer: str | None) -> None:
        self._table = table
        self._inputs = {name: spec for name, spec in model.inputs.items() if name != OWN_TARGET}
        self._model, self._own_target = model, model.inputs.get(OWN_TARGET)
        self._notes: dict[str, None] = {}
        self._settings, self._columns = settings, dict(settings.columns)
        self._source = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._padding = {TARGET: IGNORED, OWN_TARGET: IGNORED}
        self._classes: tuple[str, ...] = ()

    def examples(self, columns: Columns) -> Examples:
        table = Table(self._table.source, columns)
        absent = [column for column in self._columns.values() if column not in columns]
        if absent:
            raise DataInvalid(f"--column: {table.source} has no column {listed(absent)}; it has {listed(columns)}")
        make = {
            "classification": self._classified,
            "multi-label": self._classified,
            "regression": self._numbered,
            "token-classification": self._tagged,
            "causal-lm": self._pieces,
            "completion": self._completions,
            "seq2seq": self._answered,
            "pairs": self._pairs,
        }
        made, rows = make[self._settings.loss](table)
        if self._own_target is not None and TARGET in made:
            made[OWN_TARGET] = self._checked_own(self._own_target, made[TARGET])
        return Examples(made, self._padding, self._classes, rows, tuple(self._notes))

    def _checked_own(self, spec: TensorSpec, target: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Refuse a loss of the bundle's own that takes other labels than those that the data gives."""
        first, dtype, aligned = target[0], dtypes.dtype(spec.dtype), self._settings.loss in _BESIDE_TOKENS
        alike = len(spec.shape) == first.dim() + 1 and dtype.is_floating_point == first.is_floating_point()
        if not alike or (aligned and self._model.size(spec, 1) != self._model.size(self._ids(), 1)):
            takes = ", ".join(["examples", *("any" if size < 0 else str(size) for size in spec.shape[1:])])
            kind = "a class" if not first.is_floating_point() else "a number" if first.dim() == 0 else "numbers"
            raise DataInvalid(
                f"the bundle's own loss takes `{OWN_TARGET}` of {spec.dtype} [{takes}], and --loss "
                f"{self._settings.loss} gives {kind} for each {'token that is read' if aligned else 'example'}"
            )
        return [each.to(dtype) for each in target]

    # --- kinds of examples --------------------------------------------------------------------------------

    def _target(self, table: Table) -> tuple[str, Table]:
        """Return the column of what an example shall give, and the table without it."""
        target = self._settings.target or next((name for name in _TARGETS if name in table.columns), None)
        if target is None:
            raise DataInvalid(
                f"{table.source} has no column of targets; choose one: --target of {listed(table.columns)}"
            )
        table.column(target)
        return target, Table(table.source, {name: each for name, each in table.columns.items() if name != target})

    def _classified(self, table: Table) -> _Made:
        target, others = self._target(table)
        several = self._settings.loss == "multi-label"
        classes = Classes(self._table.column(target), target, several=several)
        if several and not classes.names:
            made, numbers = self._numbered(table)
            pairs = zip(numbers, made[TARGET], strict=True)
            row = next((row for row, each in pairs if not ((each >= 0) & (each <= 1)).all()), None)
            if row is not None:
                raise DataInvalid(f"column `{target}`, row {row}: expected names of classes, or from 0 to 1 per class")
            return made, numbers
        made, self._classes = self._values(others), classes.names
        rows = [classes.numbers(value, row) for row, value in enumerate(table.column(target), 1)]
        if several:
            none = torch.zeros(len(classes.names))
            made[TARGET] = [none.index_fill(0, torch.tensor(each, dtype=torch.int64), 1.0) for each in rows]
        else:
            made[TARGET] = [torch.tensor(each[0]) for each in rows]
        return made, _all_rows(rows)

    def _numbered(self, table: Table) -> _Made:
        target, others = self._target(table)
        made = self._values(others)
        made[TARGET] = [_tensor(value, torch.float32, target, row) for row, value in enumerate(table.column(target), 1)]
        row = next((row for row, each in enumerate(made[TARGET], 1) if each.shape != made[TARGET][0].shape), None)
        if row is not None:
            raise DataInvalid(f"column `{target}`, row {row}: expected as many numbers as in row 1")
        return made, _all_rows(made[TARGET])

    def _tagged(self, table: Table) -> _Made:
        """Give each word's class to its first token; the other tokens have none."""
        target, others = self._target(table)
        classes = Classes(self._table.column(target), target, several=True, least=IGNORED)
        self._classes = classes.names
        tags = [classes.numbers(value, row) for row, value in enumerate(table.column(target), 1)]
        lists = (name for name, values in others.columns.items() if has_lists_of_text(values))
        words = self._columns.get(_TEXT) or next(lists, None)
        if words is None:
            made = self._values(others)
            _check_counts(tags, made[self._ids().name], target, "tokens")
        else:
            encoded = self._encode(table.column(words), words, marked=True, in_words=True)
            _check_counts(tags, table.column(words), target, "words")
            tags = [of_first_tokens(each, own) for each, own in zip(encoded, tags, strict=True)]
            made = self._of_tokens(self._cut([each.ids for each in encoded]))
        return self._with_targets_of_tokens(made, tags, _all_rows(tags))

    def _pieces(self, table: Table) -> _Made:
        """Join all texts, and cut them to pieces of one length."""
        text = self._text_column(table)
        tokens = torch.tensor([t for each in self._encode(table.column(text), text, marked=False) for t in each.ids])
        length = self._length()
        pieces = list(tokens[: len(tokens) // length * length].view(-1, length))
        if not pieces:
            raise DataInvalid(f"{table.source} has {len(tokens)} tokens, less than one piece of {length}: --length")
        targets = [torch.cat([piece.new_tensor([IGNORED]), piece[1:]]) for piece in pieces]
        return {**self._of_tokens(pieces), TARGET: targets}, ()

    def _completions(self, table: Table) -> _Made:
        """Count the tokens of answers alone."""
        tokenizer = self._of_text("completion")
        answers, marked = answers_of(table, self._columns, tokenizer)
        encoded = tokenizer.encode([each.text for each in answers], marked=marked)
        targets = [each.targets(own) for each, own in zip(answers, encoded, strict=True)]
        made = self._of_tokens(self._cut([each.ids for each in encoded]))
        made, rows = self._with_targets_of_tokens(made, targets, [each.row for each in answers])
        if not self._settings.pack:
            return made, rows
        packs = packed([len(each) for each in made[TARGET]], self._length())
        self._notes[f"{len(rows)} examples are packed in {len(packs)} rows"] = None
        return {name: [torch.cat([values[n] for n in pack]) for pack in packs] for name, values in made.items()}, ()

    def _answered(self, table: Table) -> _Made:
        if self._own_target is None:
            raise DataInvalid("--loss seq2seq wants a bundle that takes `labels`: export it with --recipe seq2seq")
        target, others = self._target(table)
        text = self._text_column(others)
        made = self._of_tokens(self._cut_texts(table.column(text), text))
        made[TARGET] = self._cut_texts(table.column(target), target)
        return self._with_targets(made, _all_rows(made[TARGET]))

    def _pairs(self, table: Table) -> _Made:
        known = next((pair for pair in _PAIRS if set(pair) <= table.columns.keys()), None)
        names = known or tuple(table.texts()[:2])
        if len(names) < 2:
            raise DataInvalid(
                f"{table.source} has no two columns of text, as pairs need; it has {listed(table.columns)}"
            )
        made: dict[str, Sequence[torch.Tensor]] = {}
        for prefix, name in zip((FIRST, SECOND), names, strict=True):
            side = self._of_tokens(self._cut_texts(table.column(name), name))
            made.update({prefix + key: values for key, values in side.items()})
            self._padding.update({prefix + key: self._padding.get(key, 0) for key in side})
        return made, _all_rows(table.column(names[0]))

    def _with_targets_of_tokens(
        self, made: dict[str, Sequence[torch.Tensor]], targets: Sequence[list[int]], rows: Sequence[int]
    ) -> _Made:
        """Add the targets, cut and filled up to the tokens."""
        sizes = [len(each) for each in made[self._ids().name]]
        filled = [[*own, *[IGNORED] * size][:size] for own, size in zip(targets, sizes, strict=True)]
        return self._with_targets({**made, TARGET: [torch.tensor(each) for each in filled]}, rows)

    def _with_targets(self, made: dict[str, Sequence[torch.Tensor]], rows: Sequence[int]) -> _Made:
        """Leave out examples without a target: of a batch of these there is no mean."""
        kept = [number for number, each in enumerate(made[TARGET]) if (each != IGNORED).any()]
        if not kept:
            raise DataInvalid(f"{self._table.source} has nothing to learn within {self._length()} tokens: --length")
        if (left := len(rows) - len(kept)) > 0:
            self._notes[f"{left} of {len(rows)} texts have nothing to learn in {self._length()} tokens: left out"] = (
                None
            )
        return {name: [each[number] for number in kept] for name, each in made.items()}, [rows[n] for n in kept]

    # --- inputs -------------------------------------------------------------------------------------------

    def _values(self, table: Table) -> dict[str, Sequence[torch.Tensor]]:
        """Return each input's values: of the column of its name, of the only column, or of text."""
        columns, texts = self._columns, table.texts()
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
            return self._of_tokens(self._cut_texts(table.column(text), text))
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
        texts, columns = table.texts(), self._columns
        wanted = columns.get(_TEXT, _TEXT)
        if wanted in texts or (len(texts) == 1 and _TEXT not in columns):
            return wanted if wanted in texts else texts[0]
        raise DataInvalid(f"{table.source}: which column is the text? --column text=COLUMN, of {listed(texts)}")

    # --- tokens -------------------------------------------------------------------------------------------

    def _of_text(self, column: str) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._source, f"column `{column}` of {self._table.source}")
        return self._tokenizer

    def _encode(self, texts: Sequence[Any], column: str, *, marked: bool, in_words: bool = False) -> list[Encoded]:
        for row, text in enumerate(texts, start=1):
            words = text if in_words else [text]
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                wanted = "a list of words" if in_words else "text"
                raise DataInvalid(f"column `{column}`, row {row}: expected {wanted}, got {str(text)[:40]!r}")
        return self._of_text(column).encode(texts, marked=marked, in_words=in_words)

    def _cut_texts(self, texts: Sequence[str], column: str) -> list[torch.Tensor]:
        """Return the tokens of each text, cut at the greatest length; the mark at the end stays."""
        ids, most = [each.ids for each in self._encode(texts, column, marked=True)], self._length()
        ends = [each if len(each) <= most else [*each[: most - 1], each[-1], *each[most:]] for each in ids]
        return self._cut(ends)

    def _cut(self, ids: Sequence[list[int]]) -> list[torch.Tensor]:
        length = self._length()
        longer = sum(len(each) > length for each in ids)
        if longer:
            self._notes[f"{longer} of {len(ids)} texts are longer than {length} tokens, and are cut"] = None
        return [torch.tensor(each[:length], dtype=torch.int64) for each in ids]

    def _length(self) -> int:
        """Return the number of tokens to cut at: as asked for, or the nearest that the bundle takes."""
        (least, most), wanted = self._model.sizes_of(self._ids(), 1), self._settings.length
        length = min(max(wanted, least), most or wanted)
        if length != wanted:
            self._notes[f"texts are cut at {length} tokens, as the bundle needs, and not at --length {wanted}"] = None
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
            elif name == POSITIONS:
                made[name] = [torch.arange(len(each)) for each in tokens]
            elif name != ids:
                raise DataInvalid(f"text gives no values for input `{name}` of the bundle; use a table that has them")
        return made


_Made = tuple[dict[str, Sequence[torch.Tensor]], Sequence[int]]
"""Tensors per example by name, and the row of the data that each is of."""


def _check_counts(tags: Sequence[Sequence[int]], counted: Sequence[Any], column: str, what: str) -> None:
    for row, (own, each) in enumerate(zip(tags, counted, strict=True), start=1):
        if len(own) != len(each):
            raise DataInvalid(f"column `{column}`, row {row}: {len(own)} classes for {len(each)} {what}")


def _all_rows(values: Sequence[Any]) -> Sequence[int]:
    return range(1, len(values) + 1)


def _tensor(value: Any, dtype: torch.dtype, column: str, row: int) -> torch.Tensor:
    try:
        return torch.as_tensor(value).to(dtype)
    except (TypeError, ValueError, RuntimeError):
        raise DataInvalid(f"column `{column}`, row {row}: expected numbers, got {str(value)[:40]!r}") from None


def _value(spec: TensorSpec, value: Any, column: str, row: int) -> torch.Tensor:
    """Return the value of a row in the shape that the input has beside the batch."""
    shape, tensor = spec.shape[1:], _tensor(value, dtypes.dtype(spec.dtype), column, row)
    if all(size >= 0 for size in shape) and tensor.numel() == torch.Size(shape).numel():
        return tensor.view(shape)
    if len(shape) == tensor.dim() and all(want in (-1, has) for want, has in zip(shape, tensor.shape, strict=True)):
        return tensor
    wanted = [size if size >= 0 else "any" for size in shape]
    raise DataInvalid(f"column `{column}`, row {row}: {list(tensor.shape)} values; input `{spec.name}` takes {wanted}")
