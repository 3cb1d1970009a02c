"""A bundle in another floating dtype: the programs of `model.to(dtype)`, where graphs hold no dtype of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from aotexport_runtime.bundle.cast_programs import FLOATS, CastPrograms, is_cast
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.bundle.weights import load_tensors
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.execution.checks import place
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.rewrite.names import operands
from aotexport_runtime.schema.graph import Graph, Node, Subclass
from aotexport_runtime.schema.manifest import StateTensor, step_program
from aotexport_runtime.schema.program import ArgumentInput, Program, Refusal, StateInput
from aotexport_runtime.schema.values import DTypeArgument, SubgraphArgument, TensorMeta
from aotexport_runtime.submodules.adapter import adapters_below
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.arguments import check_type
from aotexport_runtime.values.subclasses import Form

_OF_ONE_DTYPE = ("subclass::", "distributed::", "higher_order::triton_kernel")
"""Operators that were captured for tensors of one dtype."""


class CastBundle(CastPrograms):
    """An open bundle in another floating dtype, its forward graphs alone; `original`: as it is in its files."""

    def __init__(self, bundle: Bundle, dtype: torch.dtype) -> None:
        """Cast parameters, floating buffers and floating arguments, as `model.to(dtype)` and its caller would.

        Raises:
            ArgumentInvalid: `dtype` is none.
            NotSupported: it is not floating, or a program, or the state, holds a dtype of its own; names it with the
                user's line.
        """
        check_type("dtype", dtype, torch.dtype, "a torch.dtype")
        if dtypes.name_of(dtype) not in FLOATS:
            raise NotSupported(f"`dtype`: expected one of {', '.join(FLOATS)}, got {dtypes.name_of(dtype)}")
        super().__init__(bundle, dtypes.name_of(dtype))
        manifest, self.original = bundle.manifest, bundle
        step = step_program(manifest)
        programs = [bundle.program(name) for name in bundle.program_names if name != step]
        found = {spec.meta.dtype for p in programs for spec in p.inputs if isinstance(spec, ArgumentInput)}
        found |= {entry.dtype for entry in manifest.state if is_cast(entry)}
        before = {name: self.dtype for name in found if name in FLOATS and name != self.dtype}
        for entry in manifest.state:
            _check_state(entry, before)
        constants = {entry.name for entry in manifest.state if not is_cast(entry) and entry.dtype in before}
        under_autocast = {p.name for p in programs if p.autocast is not None} if self.own else set[str]()
        served = tuple(entry for entry in self.manifest.programs if entry.name not in {step, *under_autocast})
        self.manifest = msgspec.structs.replace(self.manifest, programs=served)
        for program in programs:
            if program.name in self.own | under_autocast:
                continue
            file = program.forward.file
            graph = bundle.graph(program.name, file)
            _check_program(program, graph, before, constants)
            self._checked[self.record_path(program.name)] = _program(program, before)
            self._checked[f"programs/{program.name}/{file}"] = _cast(graph, before)

    def load_state(self, form: Callable[[Subclass], Form], *, mapped: bool | None = None) -> dict[str, torch.Tensor]:
        """Return the state in the dtypes of the manifest; see `load_tensors`."""
        tensors = load_tensors(self.original, self.original.manifest.state, form, mapped=mapped)
        return {entry.name: tensors[entry.name].to(dtypes.dtype(entry.dtype)) for entry in self.manifest.state}


def in_dtype(module: BundleModule, dtype: torch.dtype) -> BundleModule:
    """Return an independent module that is `module.to(dtype)`, in its mode, with its values and what takes gradients.

    Args:
        module: a loaded bundle, trained or not; left as it is.
        dtype: `bfloat16`, `float16`, `float32` or `float64`.

    Raises:
        ArgumentInvalid: `dtype` is none, or a submodule was changed, or has an adapter.
        NotSupported: the dtype is not floating, the module was loaded in another dtype, or a program holds a dtype of
            its own.
    """
    if isinstance(module.bundle, CastBundle):
        raise NotSupported(f"`dtype`: the module was loaded in {module.bundle.dtype}; load it in the other one")
    changed = [f"`{change.path}` {change.how}" for change in module.changes() if not change.keeps_state]
    changed += [f"`{path}` has an adapter" for path, _ in adapters_below(module)]
    if changed:
        raise ArgumentInvalid(f"`dtype`: {changed[0]}. Load the bundle in that dtype (`load(dtype=)`), and change that")
    bundle = CastBundle(module.bundle, dtype)
    before = module.state_tensors()
    state = {
        entry.name: before[entry.name].detach().to(dtypes.dtype(entry.dtype), copy=True)
        for entry in bundle.manifest.state
    }
    cast = BundleModule(bundle, state, environment=module._environment, request=module._request)
    for name, tensor in cast.state_tensors().items():
        if tensor.is_leaf and tensor.is_floating_point():
            tensor.requires_grad_(before[name].requires_grad)
    return cast.train(module.training)


def _check_state(entry: StateTensor, before: Mapping[str, str]) -> None:
    if entry.subclass is not None:
        raise NotSupported(f"`dtype`: `{entry.name}` is a tensor of a subclass. {_way_out(before)}")
    if entry.dtype.startswith("complex") and is_cast(entry):
        raise NotSupported(f"`dtype`: `{entry.name}` is {entry.dtype}, which has no floating form")


def _check_program(program: Program, graph: Graph, before: Mapping[str, str], constants: set[str]) -> None:
    """Refuse a program that holds one of the dtypes `before` beside those of parameters, buffers and arguments."""
    if program.autocast is not None:
        raise _refused(program, f"was captured under autocast to {program.autocast}", before)
    for spec in program.inputs:
        if isinstance(spec, ArgumentInput) and spec.subclass is not None:
            raise _refused(program, f"takes `{spec.path}`, a tensor of a subclass", before)
    for value, spec in zip(graph.inputs, program.inputs, strict=True):
        if isinstance(spec, StateInput) and spec.name in constants:
            reader = next((node for node in graph.nodes if value.name in operands(node)), None)
            where = "" if reader is None else f" in `{reader.op}`{_where(graph, reader)}"
            raise _refused(program, f"reads the {spec.meta.dtype} tensor `{spec.name}`{where}", before)
    for node, where in _nodes(graph):
        if node.op.startswith(_OF_ONE_DTYPE):
            raise _refused(program, f"calls `{node.op}`{where}", before)
        for leaf in _leaves([*node.args, *node.kwargs.values()]):
            if isinstance(leaf, DTypeArgument) and leaf.value in before:
                raise _refused(program, f"names {leaf.value} in `{node.op}`{where}", before)
            if isinstance(leaf, float) and (dtype := _dtype_of_limit(leaf, before)):
                raise _refused(program, f"has {leaf!r}, a limit of {dtype}, in `{node.op}`{where}", before)


def _refused(program: Program, what: str, before: Mapping[str, str]) -> NotSupported:
    return NotSupported(
        f"`dtype`: program `{program.name}` {what}. Whether the model in another dtype has the same there, the bundle "
        f"does not tell. {_way_out(before)}"
    )


def _way_out(before: Mapping[str, str]) -> str:
    dtype = next(iter(before.values()), "")
    both = f", with `--autocast {dtype}` for loads in both" if dtype in ("bfloat16", "float16") else ""
    return f"Export the model in that dtype (`--dtype {dtype}`){both}, or convert it first (`model.to(torch.{dtype})`)"


def _where(graph: Graph, node: Node) -> str:
    line = place(graph, node)
    return f" at {line}" if line else ""


def _dtype_of_limit(number: float, before: Mapping[str, str]) -> str | None:
    """Return the dtype whose greatest, least or smallest number this is; None: there is none."""
    limits = {name: torch.finfo(dtypes.dtype(name)) for name in before}
    return next((n for n, i in limits.items() if abs(number) in (i.max, i.eps, i.tiny, i.smallest_normal)), None)


def _nodes(graph: Graph, around: str = "") -> Iterator[tuple[Node, str]]:
    """Yield the nodes of a graph and of its subgraphs, each with the user's line, or that of a node around it."""
    entered = set[str]()
    for node in graph.nodes:
        where = _where(graph, node) or around
        yield node, where
        for leaf in _leaves([*node.args, *node.kwargs.values()]):
            if isinstance(leaf, SubgraphArgument) and leaf.name not in entered:
                entered.add(leaf.name)
                yield from _nodes(graph.subgraphs[leaf.name], where)


def _leaves(argument: Any) -> Iterator[Any]:
    if not isinstance(argument, list):
        yield argument
        return
    for item in argument:
        yield from _leaves(item)


def _program(program: Program, before: Mapping[str, str]) -> Program:
    refusals = program.refusals
    if program.functional is not None:
        graph = "inference" if program.functional.gradients is None else "joint"
        dtype = next(iter(before.values()), "another dtype")
        refusals = (*refusals, Refusal(graph=graph, reason=f"it was loaded in {dtype}, for which it has none"))
    return msgspec.structs.replace(_cast(program, before), functional=None, refusals=refusals)


_WITH_METADATA = ("inputs", "outputs", "nodes", "subgraphs", "meta", "items")


def _cast(value: Any, before: Mapping[str, str]) -> Any:
    """Return a record, or what a record holds, with the dtypes of the cast model in its metadata."""
    if isinstance(value, tuple):
        return tuple([_cast(item, before) for item in value])  # type: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {key: _cast(item, before) for key, item in value.items()}  # type: ignore[reportUnknownVariableType]
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {name: _cast(getattr(value, name), before) for name in _WITH_METADATA if hasattr(value, name)}
    if isinstance(value, TensorMeta):
        fields["dtype"] = before.get(value.dtype, value.dtype)
    return msgspec.structs.replace(value, **fields)
