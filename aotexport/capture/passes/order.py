"""The passes that turn a traced graph into a forward graph, in order; and the graph after each as text, in files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from aotexport.capture.passes.draft import Draft
from aotexport.capture.passes.refusals import (
    refuse_computed_state,
    refuse_history_by_views,
    refuse_hooks_on_state,
    refuse_nested_draws,
    refuse_resized_memory,
)
from aotexport.capture.passes.rewrites import (
    drop_unused_state,
    eliminate_dead_code,
    fix_gradients_of_loops,
    insert_data_checks,
    lift_constants,
    lift_subgraph_constants,
    make_grad_modes_relative,
)
from aotexport.capture.trace.forward_capture import Binding
from aotexport.torch_internals.names import HigherOrderOperator, OpOverload
from aotexport_runtime.errors import ArgumentInvalid

PASSES = (
    lift_subgraph_constants,
    lift_constants,
    refuse_hooks_on_state,
    refuse_resized_memory,
    make_grad_modes_relative,
    insert_data_checks,
    eliminate_dead_code,
    drop_unused_state,
)
"""Constants are lifted out of subgraphs first, so that all tensors are inputs from then on; data checks use nodes that
would be dead code, and state is unused once that is gone."""

PASSES_OF_GRADIENTS = (refuse_computed_state, refuse_history_by_views, refuse_nested_draws, fix_gradients_of_loops)
"""Those of programs that record gradients, after the others."""


def run_passes(draft: Draft) -> Draft:
    """Return a traced draft after all passes of its program, whose graph can run, or refuse it."""
    dump_draft(0, "traced", draft)
    for number, each in enumerate((*PASSES, *PASSES_OF_GRADIENTS) if draft.grad else PASSES, 1):
        draft = each(draft)
        dump_draft(number, each.__name__, draft)
    draft.graph.recompile()
    return draft


# --- text of drafts -------------------------------------------------------------------------------------------

_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)


@contextlib.contextmanager
def passes_dumped(directory: Path | None) -> Iterator[None]:
    """Let passes in the block write the drafts that they return; None: write nothing.

    Args:
        directory: made where it is missing. It gets `PROGRAM/00-traced.txt`, then a file for each pass that ran. Where
            a call is traced several times, the last trace stays.

    Raises:
        ArgumentInvalid: the directory cannot be made.
    """
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentInvalid(f"`dump_passes` must be a directory to write to: {error}") from error
    token = _folder.set(directory)
    try:
        yield
    finally:
        _folder.reset(token)


def program_dumped(name: str) -> contextlib.AbstractContextManager[None]:
    """Let passes in the block write to the program's folder, if they write at all."""
    directory = _folder.get()
    return passes_dumped(None if directory is None else directory / name)


def dump_draft(number: int, name: str, draft: Draft) -> None:
    """Write a draft after a pass, if a folder for it is set.

    Args:
        number: place of the pass in the list; 0: the draft was just traced, and files of earlier traces go.
        name: of the pass.
        draft: the draft that it returned.
    """
    folder = _folder.get()
    if folder is None:
        return
    if number == 0:
        for file in folder.glob("[0-9][0-9]-*.txt"):
            file.unlink()
    (folder / f"{number:02}-{name}.txt").write_text(draft_text(draft), encoding="utf-8")


def draft_text(draft: Draft) -> str:
    """Return a draft as lines of text."""
    reads = [f"reads {' '.join(sorted(draft.reads))}"] if draft.reads else []
    inputs = [
        f"%{node.name}{_typed(value)}{' requires_grad' * getattr(value, 'requires_grad', False)} = {_binding(binding)}"
        for node, binding, value in zip(
            draft.graph.graph.find_nodes(op="placeholder"), draft.bindings, draft.inputs, strict=True
        )
    ]
    return "\n".join([*reads, *inputs, *_nodes(draft.graph)]) + "\n"


def _binding(binding: Binding) -> str:
    state = [f"state {binding.entry.names[0]}"] if binding.entry is not None else []
    argument = [f"argument {binding.argument}"] if binding.argument is not None else []
    return " and ".join([*state, *argument]) + " differentiated" * binding.is_differentiated


def _nodes(module: torch.fx.GraphModule) -> Iterator[str]:
    """Yield the lines of the nodes behind the placeholders."""
    for node in module.graph.nodes:
        if node.op == "output":
            yield f"return {', '.join(map(_value, node.args[0]))}"
        elif node.op == "get_attr":
            yield f"%{node.name}{_typed(node.meta.get('val'))} = attribute {node.target}"
            subgraph = getattr(module, str(node.target), None)
            if isinstance(subgraph, torch.fx.GraphModule):
                taken = [
                    f"%{each.name}{_typed(each.meta.get('val'))}"
                    for each in subgraph.graph.find_nodes(op="placeholder")
                ]
                yield from (f"    {line}" for line in [*taken, *_nodes(subgraph)])
        elif node.op != "placeholder":
            values = [*map(_value, node.args), *(f"{name}={_value(value)}" for name, value in node.kwargs.items())]
            custom = node.meta.get("custom") or {}
            marks = "".join(f" #{name}" for name, value in custom.items() if value is True and name[0] != "_")
            yield f"%{node.name}{_typed(node.meta.get('val'))} = {_target(node)}({', '.join(values)}){marks}"


def _target(node: torch.fx.Node) -> str:
    if isinstance(node.target, str | OpOverload):
        return str(node.target)
    if isinstance(node.target, HigherOrderOperator):
        return f"higher_order.{node.target.name()}"
    return f"{node.target.__module__}.{node.target.__qualname__}"  # type: ignore[union-attr]


def _value(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value) if isinstance(value, torch.dtype | torch.layout | torch.memory_format) else repr(value)


def _typed(value: Any) -> str:
    return "" if value is None or isinstance(value, torch.fx.GraphModule) else f" : {_type(value)}"


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_type, value))})"
    return f"{type(value).__name__} {value}"
