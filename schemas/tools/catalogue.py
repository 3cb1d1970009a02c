"""What the format consists of: its documents, records, fields and named types, as plain data for the other tools.

Types are written as unions: a sorted list of arms, each a name (`int`, `null`, `TensorMeta`, `"train"`) or an object
`{"array": union}` or `{"map": union}`. A union that contains a named type names it instead of repeating its arms.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

from aotexport_runtime.schema import (
    bounded,
    graph,
    manifest,
    program,
    sizes,
    targets,
    trees,
    values,
    vectors,
)
from aotexport_runtime.schema.bounded import Record

DOCUMENTS: dict[str, type[Record]] = {
    "bundle": manifest.Manifest,
    "program": program.Program,
    "graph": graph.Graph,
    "vector": vectors.Vector,
    "lowered": targets.LoweredProgram,
    "kernels": targets.KernelLibrary,
    "target": targets.Target,
}
"""The record at the root of each kind of JSON file."""

CHAPTERS: dict[str, str] = {
    "manifest": "The manifest",
    "sizes": "Sizes",
    "values": "Values and arguments",
    "graph": "Graphs",
    "program": "Programs",
    "trees": "Trees",
    "vectors": "Test vectors",
    "targets": "Targets and kernels",
}
"""Title of the records of each module of the schema, in the order of the reference."""

NAMED_TYPES: dict[str, tuple[Any, str]] = {
    "Argument": (values.Argument, "An argument: an element, or an array of them, nested at most three deep."),
    "Element": (values.Element, "An argument that is no array; a bare string is a reference to a value of the graph."),
    "ValueMeta": (values.ValueMeta, "What a value of a graph is."),
    "Tree": (trees.Tree, "A nested input or output."),
    "InputSpec": (program.InputSpec, "What an input of a program is."),
    "OutputSpec": (program.OutputSpec, "How an output comes back to the caller."),
    "Size": (sizes.Size, "An integer, the name of a symbol, or an expression."),
    "SizeOperator": (sizes.SizeOperator, "An operator on sizes."),
    "KernelParameter": (targets.KernelParameter, "What a parameter of a kernel is."),
    "NumberType": (targets.NumberType, "How a number is passed to a kernel."),
    "AnyDType": (values.AnyDType, "An element type, also one that no tensor of a bundle has."),
    "DType": (values.DType, "An element type, by the name that torch gives it."),
    "Layout": (values.Layout, "A layout of tensors, by the name that torch gives it."),
    "DeviceClass": (values.DeviceClass, "A class of devices, by the name that torch gives it."),
    "MemoryFormat": (values.MemoryFormat, "A memory format, by the name that torch gives it."),
}
"""Types that several fields share, widest first, with a description."""

BOUNDED: dict[Any, str] = {
    type_: name for name, type_ in vars(bounded).items() if typing.get_origin(type_) is Annotated
}
"""Names of the numbers and text with bounds."""

_REFERENCES: dict[type, Callable[[Any], str]] = {
    bounded.IndexOf: lambda rule: f"index into `{rule.of}`" if rule.of else "without leaves",
    bounded.TensorOf: lambda rule: "of a tensor",
    bounded.NameOf: lambda rule: f"in `{rule.of}`",
    bounded.Over: lambda rule: f"over `{rule.of}`",
    bounded.Length: lambda rule: f"as many as `{rule.of}`",
    bounded.Code: lambda rule: f"refused as `{rule.code}`",
    bounded.Unique: lambda rule: f"unique by `{rule.by.replace(' ', '` and `')}`" if rule.by else "unique",
}
Union = list[Any]
_PLAIN: dict[Any, str] = {Any: "any", bool: "bool", int: "int", float: "float", str: "string", types.NoneType: "null"}


def records() -> list[type[Record]]:
    """Return every record that a document can hold, sorted by name."""
    found: dict[str, type[Record]] = {}
    waiting: list[type[Record]] = list(DOCUMENTS.values())
    while waiting:
        record = waiting.pop()
        if record.__name__ not in found:
            found[record.__name__] = record
            waiting += [mentioned for hint in hints(record).values() for mentioned in _records_in(hint)]
    return [found[name] for name in sorted(found)]


def by_module() -> dict[str, list[type[Record]]]:
    """Return the records by the name of their module, in the order of `CHAPTERS`, each as the module defines them."""
    chapters: dict[str, list[type[Record]]] = {module: [] for module in CHAPTERS}
    for record in records():
        chapters[record.__module__.rpartition(".")[2]].append(record)
    for found in chapters.values():
        place = list(vars(sys.modules[found[0].__module__]))
        found.sort(key=lambda record: place.index(record.__name__))
    return chapters


def hints(record: type[Record], *, bounds: bool = False) -> dict[str, Any]:
    """Return the type of each field of `record`, in order; with bounds, or without."""
    resolved = typing.get_type_hints(record, include_extras=bounds)
    return {name: resolved[name] for name in record.__struct_fields__}


def _records_in(hint: Any) -> Iterator[type[Record]]:
    if isinstance(hint, type) and issubclass(hint, Record):
        yield hint
    for argument in typing.get_args(hint):
        yield from _records_in(argument)


def union_of(hint: Any, *, within: str = "") -> Union:
    """Return a type as a union.

    Args:
        hint: a type annotation.
        within: name of the named type that is being spelled out, which is not named itself.
    """
    arms = _arms(hint)
    union: Union = []
    for name, (named, _) in NAMED_TYPES.items():
        covered = _arms(named)
        if name != within and all(arm in arms for arm in covered):
            union.append(name)
            arms = [arm for arm in arms if arm not in covered]
    union += [_arm(arm) for arm in arms]
    return sorted(union, key=str)


def _arms(hint: Any) -> list[Any]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [arm for part in typing.get_args(hint) for arm in _arms(part)]
    if origin is typing.Literal:
        return [typing.Literal[value] for value in typing.get_args(hint)]  # pyrefly: ignore[invalid-literal]
    if origin is Annotated:
        type_, *rules = typing.get_args(hint)
        bounds = next((rule for rule in rules if isinstance(rule, bounded.Bounds)), None)
        return _arms(type_) if bounds is None else [Annotated[type_, bounds]]
    return [hint]


def references_of(hint: Any) -> list[str]:
    """Return what a type declares of references, in words."""
    type_, *rules = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    said = [_REFERENCES[type(rule)](rule) for rule in rules if type(rule) in _REFERENCES]
    return said + [each for part in typing.get_args(type_) for each in references_of(part)]


def _arm(arm: Any) -> Any:
    origin, arguments = typing.get_origin(arm), typing.get_args(arm)
    if arm in _PLAIN:
        return _PLAIN[arm]
    if origin is Annotated:
        return BOUNDED.get(arm) or _counted(_arm(arguments[0]), arguments[1])
    if origin is typing.Literal:
        return f'"{arguments[0]}"'
    if origin in (tuple, list):
        return {"array": union_of(arguments[0])}
    if origin is dict:
        return {"map": union_of(arguments[1])}
    return arm.__name__


def _counted(array: dict[str, Union], bounds: bounded.Bounds) -> dict[str, Union]:
    """Return an array with how many items it has: `array(1 or more)`."""
    least, most = bounds.minItems or 0, bounds.maxItems
    if (least, most) == (0, None):
        return array
    return {f"array({least} or more)" if most is None else f"array({least} to {most})": array["array"]}


def spelled(union: Union) -> str:
    """Return a union for people to read: `array<int | null>`."""
    return " | ".join(sorted((_spelled_arm(arm) for arm in union), key=lambda text: (text == "null", text)))


def _spelled_arm(arm: Any) -> str:
    if isinstance(arm, str):
        return arm
    ((kind, items),) = arm.items()
    return f"{kind}<{spelled(items)}>"


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a field that is not required, as JSON has it."""
    factory = field.default_factory
    default = field.default if factory is msgspec.NODEFAULT else factory()
    return msgspec.json.decode(msgspec.json.encode(default))


def attribute_docs(record: type[Record]) -> dict[str, str]:
    """Return what the docstrings of `record`, and of the records that it extends, say about each field."""
    docs: dict[str, str] = {}
    for base in reversed(record.__mro__):
        docs |= own_docs(base) if issubclass(base, Record) else {}
    return {name: docs[name] for name in record.__struct_fields__ if name in docs}


def own_docs(record: type[Record]) -> dict[str, str]:
    """Return what the docstring of `record` says about fields, by name."""
    docs: dict[str, str] = {}
    name = ""
    # Python 3.13 and newer keep docstrings without their indentation.
    _, _, section = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")
    for line in section.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 4:
            name, _, text = line.strip().partition(": ")
            docs[name] = text
        elif name and line.strip():
            docs[name] += " " + line.strip()
    return docs


def summary_of(record: type[Record]) -> str:
    """Return the docstring of `record` up to its fields, as one line."""
    text, _, _ = (record.__doc__ or "").partition("Attributes:\n")
    return " ".join(text.split())
