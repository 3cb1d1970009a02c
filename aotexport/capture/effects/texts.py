"""Tell text that a model's code makes for people from text that it computes with, such as a key."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import linecache
import logging
import warnings
from types import FrameType
from typing import Any

import torch

_SHOWING = (torch._assert, warnings.warn, print)
_Place = tuple[int, int, int, int]


def is_message(frame: FrameType) -> bool:
    """Return whether the running instruction makes text in a statement that only shows it.

    Such is a call of `torch._assert`, `print`, `warnings.warn` or a logger, with no call in between that takes the
    text. False: it is none, or has no source.
    """
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if None in position:
        return False
    line, end_line, column, end_column = position
    place: Any = (line, column, end_line, end_column)
    for statement in _calls(frame.f_code.co_filename):
        if _is_within(place, statement):
            between = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and _is_within(place, node)]
            return all(_place(node) == place for node in between[1:]) and _shows(_value(statement.func, frame))
    return False


@functools.lru_cache(maxsize=32)
def _calls(file: str) -> list[ast.Call]:
    """Return the statements of a file that are calls whose results nobody takes."""
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    except SyntaxError:
        return []
    return [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]


def _place(node: ast.expr) -> _Place:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _is_within(place: _Place, node: ast.expr) -> bool:
    around = _place(node)
    return around[:2] <= place[:2] and place[2:] <= around[2:]


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a dotted name; None: it is another expression."""
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr, None)
    name = node.id if isinstance(node, ast.Name) else ""
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in names:
            return names[name]
    return None


def _shows(function: Any) -> bool:
    return any(function is known for known in _SHOWING) or isinstance(
        getattr(function, "__self__", None), logging.Logger
    )
