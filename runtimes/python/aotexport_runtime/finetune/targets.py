"""Targets: the classes that rows name, the answers within texts, and the examples that share a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aotexport_runtime.errors import DataInvalid
from aotexport_runtime.finetune.table import Table, listed
from aotexport_runtime.finetune.tokenizer import Encoded, Span, Tokenizer

IGNORED = -100
"""The class of a token that has none."""


class Classes:
    """The classes of a column.

    Attributes:
        names: of the classes, where the data names them.
    """

    def __init__(self, everything: Sequence[Any], column: str, *, several: bool, least: int = 0) -> None:
        """Find the names in all rows of a column.

        Args:
            everything: a class a row, or a list of them.
            column: its name, for messages.
            several: rows are lists.
            least: the least number that a class may have without a name.
        """
        self._column, self._several, self._least = column, several, least
        lists = (row for row in everything if isinstance(row, list)) if several else [everything]
        self.names = tuple(sorted({value for each in lists for value in each if isinstance(value, str)}))
        self._number = {name: index for index, name in enumerate(self.names)}

    def numbers(self, value: Any, row: int) -> list[int]:
        """Return the numbers of a row's classes; `DataInvalid`: it has something else."""
        found, where = value if self._several else [value], f"column `{self._column}`, row {row}"
        if not isinstance(found, list):
            raise DataInvalid(f"{where}: expected a list of classes, got {str(value)[:40]!r}")
        for each in found:
            is_number = hasattr(each, "__index__") and not isinstance(each, bool) and each >= self._least
            if not (isinstance(each, str) if self.names else is_number):
                wanted = "the name of a class" if self.names else "a class (0, 1, ...) or its name"
                raise DataInvalid(f"{where}: expected {wanted}, got {each!r}")
            if self.names and each not in self._number:
                raise DataInvalid(f"column `{self._column}`: class {each!r} is in the held-out rows alone")
        return [self._number[each] if self.names else int(each) for each in found]


def has_lists_of_text(values: Sequence[Any]) -> bool:
    """Return whether the rows of a column are lists of words."""
    return isinstance(next((row[0] for row in values if isinstance(row, list) and row), None), str)


def of_first_tokens(encoded: Encoded, classes: Sequence[int]) -> list[int]:
    """Return a class per token: that of its word at the first token of a word, none elsewhere."""
    pairs = zip(encoded.words, [None, *encoded.words], strict=False)
    return [IGNORED if word is None or word == before else classes[word] for word, before in pairs]


def packed(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return which examples share a row of at most `most` tokens: the longest first, each where it leaves least."""
    by_room: list[list[list[int]]] = [[] for _ in range(most + 1)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        room = next((room for room in range(sizes[number], most) if by_room[room]), most)
        row = by_room[room].pop() if by_room[room] else []
        by_room[room - sizes[number]].append([*row, number])
    return [row for rows in by_room for row in rows]


@dataclass(frozen=True)
class Answers:
    """A text in which some parts are answers.

    Attributes:
        text: all that the model reads.
        spans: where the answers are.
        row: the row of the data, from 1.
    """

    text: str
    spans: Sequence[Span]
    row: int

    def targets(self, encoded: Encoded) -> list[int]:
        """Return per token the token itself where it begins in an answer, none elsewhere, and none at the first."""
        answer = [begin < end and any(a <= begin < b for a, b in self.spans) for begin, end in encoded.spans]
        return [token if own and i else IGNORED for i, (token, own) in enumerate(zip(encoded.ids, answer, strict=True))]


def answers_of(table: Table, columns: Mapping[str, str], tokenizer: Tokenizer) -> tuple[list[Answers], bool]:
    """Return the texts with answers of a table, and whether the tokenizer is to add its marks to them.

    Rows have `messages`, or `prompt` and `completion`, both text or both messages.

    Args:
        table: the rows.
        columns: the table's columns of these, where they have other names.
        tokenizer: that of the model; its chat template makes texts of messages.

    Raises:
        DataInvalid: there are no such columns, or a row has something else.
    """
    messages, prompt, completion = (columns.get(name, name) for name in ("messages", "prompt", "completion"))
    if messages in table.columns:
        rows = [(each, 0) for each in table.column(messages)]
    elif {prompt, completion} <= table.columns.keys():
        rows = list(zip(table.column(prompt), table.column(completion), strict=True))
    else:
        raise DataInvalid(
            f"{table.source} has neither `messages` nor `prompt` and `completion`; name them: --column prompt=COLUMN, "
            f"of {listed(table.columns)}"
        )
    found: list[Answers] = []
    are_texts = isinstance(rows[0][0], str)
    end = tokenizer.end if are_texts else ""
    for row, (before, after) in enumerate(rows, 1):
        try:
            if not are_texts:
                turns = before if after == 0 else [*_messages(before), *_messages(after)]
                found += _of_conversation(_messages(turns), 0 if after == 0 else len(before), tokenizer, row)
            elif isinstance(before, str) and isinstance(after, str):
                text = before + after + ("" if after.endswith(end) else end)
                found.append(Answers(text, [(len(before), len(text))], row))
            else:
                raise DataInvalid(
                    f"expected text as in row 1, got {str(after if isinstance(before, str) else before)[:40]!r}"
                )
        except DataInvalid as error:
            raise DataInvalid(f"{table.source}, row {row}: {error}") from None
    return found, are_texts


def _of_conversation(turns: list[Any], since: int, tokenizer: Tokenizer, row: int) -> list[Answers]:
    """Return one text with all answers, or a text an answer where the template changes earlier turns."""
    found: list[Answers] = []
    for number, turn in enumerate(turns):
        if number >= since and turn["role"] == "assistant":
            until = tokenizer.chat(turns[: number + 1], asks=False)
            before = [tokenizer.chat(turns[:number], asks=asks) for asks in ((True, False) if number else ())]
            begin = next((len(text) for text in before if until.startswith(text)), 0)
            found.append(Answers(until, [(begin, len(until))], row))
    if not found:
        raise DataInvalid("the conversation has no message of the role `assistant`")
    last = found[-1].text
    if all(last.startswith(each.text) for each in found):
        return [Answers(last, [span for each in found for span in each.spans], row)]
    return found


def _messages(turns: Any) -> list[Any]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise DataInvalid(f"expected a list of messages with `role` and `content`, got {str(turns)[:40]!r}")
    return turns
