"""The weights that a request for adapters means, and the form that an adapter of each can take."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from aotexport_runtime.engines.forward.readers import Kind, Reader, Readers
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.manifest import StateTensor, step_program
from aotexport_runtime.schema.values import SizeArgument
from aotexport_runtime.submodules.submodule import LoadedSubmodule
from aotexport_runtime.submodules.tables import is_below, module_at
from aotexport_runtime.values import dtypes

ALL_LINEAR = "all-linear"
_CONSTANTS = Environment()
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A weight that can have an adapter.

    Attributes:
        name: its name.
        form: `graph`: the results of nodes that read it are changed; `weight`: the weight is, before they read it.
        kind: what operators do with it; in weight space that of a linear layer.
        options: what those operators take after their bias.
        why: why it has this form.
        returned: whether a program returns what a layer computes with it, or what follows from that without weights.
        computed: what it is, where its layer computes it of integers; None: the module has it.
    """

    name: str
    form: Literal["graph", "weight"]
    kind: Kind
    options: tuple[Any, ...] = ()
    why: str
    returned: bool = False
    computed: StateTensor | None = None

    @property
    def path(self) -> str:
        """Path of its module."""
        return self.name.rpartition(".")[0]

    @property
    def tensor(self) -> str:
        """Its name in its module."""
        return self.name.rpartition(".")[2]

    def weight(self, module: nn.Module) -> torch.Tensor:
        """Return the weight; of one that its layer computes a tensor alike, without memory."""
        layer = module.get_submodule(self.path)
        if self.computed is None:
            return getattr(layer, self.tensor)
        empty = torch.empty((), dtype=dtypes.dtype(self.computed.dtype), device=next(layer.parameters()).device)
        return empty.expand(self.computed.shape)


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
        """Read the forward graphs of every program but a step, which has no adapters."""
        self._module = module
        bundle, step = module.bundle, step_program(module.bundle.manifest)
        programs = [bundle.program(entry.name) for entry in bundle.manifest.programs if entry.name != step]
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
            if is_loaded(module_at(module, name.rpartition(".")[0]), module)
            or any(is_below(name, path) for path in replaced)
        }
        self._computed = {name: entry for _, readers in self._readers for name, entry in readers.computed.items()}
        order = {path: place for place, (path, _) in enumerate(module.named_modules(remove_duplicate=False))}
        found = {**self.entries, **self._computed}
        self.entries = dict(sorted(found.items(), key=lambda item: order.get(item[0].rpartition(".")[0], 0)))

    def target(self, name: str) -> Target | None:
        """Return the weight `name` with the form of its adapter; None: no program reads it.

        `NotSupported`: the bundle does not say which nodes read it by this name, or a program writes to it.
        """
        entry, path = self.entries[name], name.rpartition(".")[0]
        names = (entry.name, *entry.tied)
        found = [(program, each) for program, readers in self._readers for each in readers.of(names, path)]
        if not found and entry.tied and any(readers.value(names) is not None for _, readers in self._readers):
            tied = next(other for other in names if other != name)
            raise NotSupported(
                f"`{name}` and `{tied}` are one tensor, and the bundle does not say which nodes read it by the one "
                "name: it was exported with `--strip`, or not by a direct trace. Export it again"
            )
        if not found:
            return None
        uses = {_use(each) for _, each in found}
        if len(uses) == 1 and (use := uses.pop()) is not None:
            kind, given = use
            options = tuple(list(value) if isinstance(value, tuple) else value for value in given)
            why, returned = f"read by `{found[0][1].op}` alone", any(each.returned for _, each in found)
            facts: dict[str, Any] = {"why": why, "returned": returned, "computed": self._computed.get(name)}
            return Target(name=name, form="graph", kind=kind, options=options, **facts)
        otherwise = next(((program, each) for program, each in found if each.operands is None), None)
        why = "its nodes use it in several ways"
        if otherwise is not None:
            why = f"program `{otherwise[0]}` reads it by `{otherwise[1].op}`"
        if entry.tied or len(entry.shape) != 2:
            shape = "tied to another" if entry.tied else f"no matrix, but {list(entry.shape)}"
            raise NotSupported(f"`{name}` cannot have an adapter: {why}, and it is {shape}")
        return Target(name=name, form="weight", kind="linear", why=why)

    def targets(self, names: Iterable[str]) -> list[Target]:
        """Return those of the weights that a program reads; errors: see `target`."""
        return [target for name in names if (target := self.target(name)) is not None]

    def linear(self, *, called: bool = False) -> list[Target]:
        """Return the weights of linear layers, as of peft's, without that of a language model's scores.

        `called`: only of those that the model's code uses by calls alone.

        Where the bundle does not name that layer, it is one of outputs that is as large as an embedding.
        """
        targets: list[Target] = []
        for name in self.entries:
            with contextlib.suppress(NotSupported):
                targets += self.targets([name])
        vocabularies = {self.entries[target.name].shape for target in targets if target.kind == "embedding"}
        scores = [t.path for t in targets if t.returned and self.entries[t.name].shape in vocabularies]
        _, *scores = getattr(self._module, "_embeddings", ("", *scores))
        kinds = ("linear", "transposed")
        layers = [t for t in targets if t.form == "graph" and t.kind in kinds and t.path not in scores]
        layers = [t for t in layers if all(readers.is_layer(t.name) for _, readers in self._readers)]
        return [t for t in layers if not called or all(readers.is_called(t.path) for _, readers in self._readers)]

    def chosen(self, targets: str | Sequence[str], exclude: Sequence[str]) -> list[Target]:
        """Return the weights that the patterns `targets` of `add_lora` mean without `exclude`, in order."""
        patterns = (targets,) if isinstance(targets, str) else tuple(targets)
        if not patterns:
            raise ArgumentInvalid('`targets`: expected "all-linear" or patterns of layers, got none')
        meant: set[str] = set()
        for pattern in patterns:
            names = [n for n in self.entries if matches(n, pattern)]
            names = [target.name for target in self.linear()] if pattern == ALL_LINEAR else names
            if not names:
                raise ArgumentInvalid(f"`targets`: {pattern!r} means no weight of the module{self._nearest(pattern)}")
            meant.update(names)
        left = (n for n in self.entries if n in meant and not any(matches(n, pattern) for pattern in exclude))
        if not (found := self.targets(left)):
            raise ArgumentInvalid(f"`targets`: no program reads a weight that {', '.join(map(repr, patterns))} means")
        return found

    def _nearest(self, pattern: str) -> str:
        last = {layer_of(name).rpartition(".")[2]: layer_of(name) for name in self.entries}
        near = difflib.get_close_matches(pattern.rpartition(".")[2].strip("*"), last, n=3, cutoff=0.3)
        named = ", ".join(f"`{last[name]}`" for name in near or list(last)[:3])
        return f". Layers that it has: {named}" if named else ", which has no weights"


def is_loaded(owner: nn.Module | None, module: BundleModule) -> bool:
    """Return whether a module below `module` is the bundle's, and not one that the user put there."""
    return owner is module or isinstance(owner, LoadedSubmodule)


def layer_of(name: str) -> str:
    """Return the path of a layer whose weight is `name`; the name itself of other tensors."""
    path, _, tensor = name.rpartition(".")
    return path if tensor == "weight" else name


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern means a weight: a path, the end of one, or one with `*`, `?` and `[]`."""
    known = {name, layer_of(name)}
    return any(n == pattern or n.endswith(f".{pattern}") or fnmatch.fnmatchcase(n, pattern) for n in known)


def _use(reader: Reader) -> tuple[Kind, tuple[Any, ...]] | None:
    """Return what an operator does with a weight, and what it takes after weight and bias; None: neither is known."""
    if reader.node is None or reader.operands is None:
        return None
    kind = reader.operands.kind
    after = {"convolution": 3, "embedding": 2}.get(kind)
    given = [] if after is None else reader.node.args[after:]
    sizes = any(isinstance(i, SizeArgument) for a in given for i in (a if isinstance(a, list) else [a]))
    if sizes or (after is not None and reader.node.kwargs):
        return None
    values: list[Any] = [constant_value(argument, _CONSTANTS) for argument in given]
    return kind, tuple(tuple(value) if isinstance(value, list) else value for value in values)
