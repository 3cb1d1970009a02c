"""Dtypes of results as the load infers them, against what torch's operators gave for samples of torch's own tests."""

from typing import Any

from aotexport_runtime.allowed.operators import aten_signatures
from aotexport_runtime.allowed.signatures import signature_of
from aotexport_runtime.schema.graph import Node
from aotexport_runtime.schema.values import Argument, DTypeArgument, NothingMeta, StringArgument, TensorMeta, ValueMeta
from aotexport_runtime.validate.types import kinds, result_dtypes
from tests.fuzz.valid_calls import valid_calls

UNRECORDED = {"copy", "native_dropout", "rand_like"}
"""Operators of the table that no recorded call has; goldens and cases do."""


def inferred(operator: str, call: dict[str, Any]) -> str | tuple[str, ...] | None:
    values: dict[str, ValueMeta] = {}

    def argument(value: Any) -> Argument:
        if isinstance(value, list):
            return [argument(each) for each in value]
        if isinstance(value, str):
            return StringArgument(value=value)
        if not isinstance(value, dict):
            return value
        if "shape" not in value:
            return DTypeArgument(value=value["dtype"]) if "dtype" in value else None
        name = f"v{len(values)}"
        values[name] = TensorMeta(dtype=value["dtype"], shape=tuple(value["shape"]), stride=(1,) * len(value["shape"]))
        return name

    schema = aten_signatures()[operator]
    signature = signature_of(schema)
    assert signature is not None
    given = {name: argument(value) for name, value in call.items() if name != "results"}
    args = [given.pop(parameter.name) for parameter in signature.positional if parameter.name in given]
    node = Node(name="r", op=f"aten::{operator}", args=args, kwargs=given, meta=NothingMeta())
    return result_dtypes(node, schema, values)


def test_inferred_dtypes_are_those_that_operators_give():
    wrong: list[tuple[str, Any, Any]] = []
    seen: set[str] = set()
    for operator, calls in valid_calls().items():
        for call in calls:
            found = inferred(operator, call)
            given = [each["dtype"] for each in call["results"] if isinstance(each, dict)]
            if found is not None:
                seen.add(operator.partition(".")[0])
                if given != ([found] * len(given) if isinstance(found, str) else list(found)):
                    wrong.append((operator, found, given))
    assert wrong == []
    assert set(kinds()) - seen == UNRECORDED
