"""Sections 5 and 6: sizes, arguments, element types."""

import math
import operator
from functools import reduce
from typing import Any

import torch

SIZE_OPERATORS: dict[str, Any] = {
    "add": lambda *a: reduce(operator.add, a),
    "mul": lambda *a: reduce(operator.mul, a),
    "floordiv": operator.floordiv,
    "ceildiv": lambda a, b: -(-a // b),
    "mod": operator.mod,
    "pow": operator.pow,
    "min": min,
    "max": max,
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
    "and": lambda *a: int(all(a)),
    "or": lambda *a: int(any(a)),
    "not": lambda a: int(not a),
    "float": float,
    "truediv": operator.truediv,
    "sqrt": math.sqrt,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
}


def size(record: Any, symbols: dict[str, int]) -> Any:
    """Return the value of a size expression (section 5)."""
    if isinstance(record, str):
        return symbols[record]
    if not isinstance(record, dict):
        return record
    if record["op"] == "where":
        return size(record["args"][1 if size(record["args"][0], symbols) else 2], symbols)
    return SIZE_OPERATORS[record["op"]](*(size(each, symbols) for each in record["args"]))


def symbols_of(record: Any) -> set[str]:
    """Return the symbols in a size expression."""
    if isinstance(record, dict):
        return set().union(*map(symbols_of, record["args"]))
    return {record} if isinstance(record, str) else set()


def dtype(name: str) -> torch.dtype:
    """Return an element type by its name."""
    return getattr(torch, name)


class Body(str):
    """The name of a subgraph among arguments."""

    __slots__ = ()


def argument(record: Any, values: dict[str, Any], symbols: dict[str, int]) -> Any:
    """Return the value of an argument (section 6); a bare string is a reference."""
    if isinstance(record, str):
        return values[record]
    if isinstance(record, list):
        return [argument(each, values, symbols) for each in record]
    if not isinstance(record, dict):
        return record
    kind, value = record["kind"], record.get("value")
    if kind == "slice":
        return slice(*(argument(record.get(part), values, symbols) for part in ("start", "stop", "step")))
    if kind == "complex":
        real, imag = (argument(record[part], values, symbols) for part in ("real", "imag"))
        return complex(real, imag)
    plain: dict[str, Any] = {
        "string": lambda: value,
        "float": lambda: float(str(value)),
        "dtype": lambda: dtype(str(value)),
        "device": lambda: torch.device(record["type"]),
        "layout": lambda: getattr(torch, str(value)),
        "memory_format": lambda: getattr(torch, str(value)),
        "size": lambda: size(value, symbols),
        "subgraph": lambda: Body(record["name"]),
    }
    return plain[kind]()


def references(record: Any) -> list[str]:
    """Return the names that an argument refers to."""
    if isinstance(record, str):
        return [record]
    if isinstance(record, list):
        return [name for each in record for name in references(each)]
    if isinstance(record, dict) and record["kind"] == "slice":
        return [record[part] for part in ("start", "stop", "step") if isinstance(record.get(part), str)]
    return []
