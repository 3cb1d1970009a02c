"""The weights that a request for adapters means, and the form that an adapter of each can take."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aotexport_runtime.engines.forward.readers import Kind, Reader, Readers
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.manifest import StateTensor
from aotexport_runtime.schema.values import SizeArgument
from aotexport_runtime.submodules.places import is_below, module_at
from aotexport_runtime.submodules.submodule import LoadedSubmodule

ALL_LINEAR = "all-linear"
_CONSTANTS = Environment()
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A weight that can have an adapter.

    Attributes:
        name: its name.
        path: path of its module.
        tensor: its name in its module.
        form: `graph`: the results of nodes that read it are changed; `weight`: the weight is, before they read it.
        kind: what operators do with it; in weight space that of a linear layer.
        options: what those operators take after their bias.
        why: why it has this form.
        returned: whether a program returns what a layer computes with it.
    """

    name: str
    path: str
    tensor: str
    form: Literal["graph", "weight"]
    kind: Kind
    options: tuple[Any, ...] = ()
    why: str
    returned: bool = False


@dataclass(frozen=True)
class Report:
    """The adapters of a module.

    Attributes:
        targets: adapted weights, each with its form and the reason.
        trained: names of parameters that are trained whole.
        trainable: number of elements that are trained.
        total: number of elements of all parameters.
    """

    targets: tuple[Target, ...]
    trained: tuple[str, ...]
    trainable: int
    total: int

    def __str__(self) -> str:
        """Return a table."""
        width = max((len(target.name) for target in self.targets), default=0)
        rows = [f"{target.name:<{width}}  {target.form:<6}  {target.why}" for target in self.targets]
        rows += [f"{name:<{width}}  whole" for name in self.trained]
        return "\n".join([*rows, f"{self.trainable:,} of {self.total:,} elements are trained"])


class Weights:
    """The weights of a loaded bundle, with their uses in all its programs."""

    def __init__(self, module: BundleModule) -> None:
        """Read the forward graphs of every program."""
        self._module = module
        bundle = module.bundle
        programs = [bundle.program(entry.name) for entry in bundle.manifest.programs]
        self._readers = [(p.name, Readers(bundle.graph(p.name, p.forward.file), p)) for p in programs]
        replaced = [
            change.path
            for change in module.changes()
            if change.module is not None and not isinstance(change.module, LoadedSubmodule)
            if next(change.module.parameters(), None) is not None
        ]
        self.entries = {
            name: entry
            for entry in bundle.manifest.state
            if entry.role == "parameter" and len(entry.shape) > 1 and entry.dtype in _FLOATS and entry.subclass is None
            for name in (entry.name, *entry.tied)
            if self._is_loaded(name) or any(is_below(name, path) for path in replaced)
        }

    def _is_loaded(self, name: str) -> bool:
        owner = module_at(self._module, name.rpartition(".")[0])
        return owner is self._module or isinstance(owner, LoadedSubmodule)

    def target(self, name: str) -> Target | None:
        """Return the weight `name` with the form of its adapter; None: no program reads it.

        Raises:
            NotSupported: the bundle does not say which nodes read it by this name, or a program writes to it.
        """
        entry, (path, _, tensor) = self.entries[name], name.rpartition(".")
        found = [(program, each) for program, readers in self._readers for each in readers.of(_names(entry), path)]
        if not found:
            self._check_told(name, entry)
            return None
        kinds: set[Kind] = {each.operands.kind for _, each in found if each.operands is not None}
        options = {_options(each) for _, each in found}
        otherwise = next(((program, each) for program, each in found if each.operands is None), None)
        if otherwise is None and len(kinds) == 1 and len(options) == 1 and None not in options:
            kind, given = kinds.pop(), options.pop() or ()
            why = f"read by `{found[0][1].op}` alone"
            values = tuple(list(value) if isinstance(value, tuple) else value for value in given)
            returned = any(each.returned for _, each in found)
            return Target(
                name=name, path=path, tensor=tensor, form="graph", kind=kind, options=values, why=why, returned=returned
            )
        program, reader = otherwise or found[0]
        why = f"program `{program}` reads it by `{reader.op}`" if otherwise else "its nodes use it in several ways"
        if entry.tied or len(entry.shape) != 2:
            shape = "tied to another" if entry.tied else f"no matrix, but {list(entry.shape)}"
            raise NotSupported(f"`{name}` cannot have an adapter: {why}, and it is {shape}")
        return Target(name=name, path=path, tensor=tensor, form="weight", kind="linear", why=why)

    def _check_told(self, name: str, entry: StateTensor) -> None:
        if entry.tied and any(readers.value(_names(entry)) is not None for _, readers in self._readers):
            tied = next(other for other in _names(entry) if other != name)
            raise NotSupported(
                f"`{name}` and `{tied}` are one tensor, and the bundle does not say which nodes read it by the one "
                "name: it was exported with `--strip`, or not by a direct trace. Export it again"
            )

    def linear(self) -> list[str]:
        """Return the names of weights of linear layers, without layers of outputs that are as large as an embedding."""
        targets = [target for name in self.entries if (target := self._quiet(name)) is not None]
        vocabularies = {self.entries[target.name].shape for target in targets if target.kind == "embedding"}
        return [
            target.name
            for target in targets
            if target.form == "graph"
            and target.kind in ("linear", "transposed")
            and not (target.returned and self.entries[target.name].shape in vocabularies)
        ]

    def _quiet(self, name: str) -> Target | None:
        try:
            return self.target(name)
        except NotSupported:
            return None

    def chosen(self, targets: str | Sequence[str], exclude: Sequence[str]) -> list[Target]:
        """Return the weights that patterns mean, in the order of the module.

        Args:
            targets: `all-linear`, or patterns of paths of layers or names of weights.
            exclude: patterns of those to leave out.

        Raises:
            ArgumentInvalid: a pattern means none.
            NotSupported: a weight cannot have an adapter.
        """
        patterns = (targets,) if isinstance(targets, str) else tuple(targets)
        if not patterns:
            raise ArgumentInvalid('`targets`: expected "all-linear" or patterns of layers, got none')
        meant: set[str] = set()
        for pattern in patterns:
            names = self.linear() if pattern == ALL_LINEAR else [n for n in self.entries if matches(n, pattern)]
            if not names:
                raise ArgumentInvalid(f"`targets`: {pattern!r} means no weight of the module{self._nearest(pattern)}")
            meant.update(names)
        left = [n for n in self.entries if n in meant and not any(matches(n, pattern) for pattern in exclude)]
        found = [target for name in left if (target := self.target(name)) is not None]
        if not found:
            raise ArgumentInvalid(f"`targets`: no program reads a weight that {', '.join(map(repr, patterns))} means")
        return found

    def _nearest(self, pattern: str) -> str:
        last = {layer_of(name).rpartition(".")[2]: layer_of(name) for name in self.entries}
        near = difflib.get_close_matches(pattern.rpartition(".")[2].strip("*"), last, n=3, cutoff=0.3)
        named = ", ".join(f"`{last[name]}`" for name in near or list(last)[:3])
        return f". Layers that it has: {named}" if named else ", which has no weights"


def layer_of(name: str) -> str:
    """Return the path of a layer whose weight is `name`; the name itself of other tensors."""
    path, _, tensor = name.rpartition(".")
    return path if tensor == "weight" else name


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern means a weight: a path, the end of one, or one with `*`, `?` and `[]`."""
    known = {name, layer_of(name)}
    return any(n == pattern or n.endswith(f".{pattern}") or fnmatch.fnmatchcase(n, pattern) for n in known)


def _names(entry: StateTensor) -> tuple[str, ...]:
    return (entry.name, *entry.tied)


def _options(reader: Reader) -> tuple[Any, ...] | None:
    """Return what an operator takes after weight and bias, hashable; None: sizes of the call are among it."""
    after = {"convolution": 3, "embedding": 2}
    if reader.node is None or reader.operands is None or reader.operands.kind not in after:
        return ()
    given = reader.node.args[after[reader.operands.kind] :]
    if reader.node.kwargs or any(
        isinstance(i, SizeArgument) for a in given for i in (a if isinstance(a, list) else [a])
    ):
        return None
    values: list[Any] = [constant_value(argument, _CONSTANTS) for argument in given]
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)
