"""Forms of operators: their results by other operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from aotexport_runtime.schema.values import TensorMeta

Call = Callable[..., fx.Node]
"""Adds a call of a function to a graph; returns its node."""

Metas = Sequence[TensorMeta | None]
"""Metadata per positional argument; None: it is no tensor."""

Form = Callable[[Call, list[Any], Mapping[str, Any], Metas], Any]
"""Adds nodes to a graph that compute an operator on arguments; returns its node, or a node per result. May raise
`NoForm`."""


class NoForm(Exception):
    """An operator has no form for these arguments; says why."""
