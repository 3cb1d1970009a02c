"""Set the training or evaluation mode of a module, and attributes of its submodules, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import nn
from torch.fx import GraphModule, Node

from aotexport.errors import ExportFailed
from aotexport.model.attributes import Attributes
from aotexport.model.restore import UNCHANGED, restored
from aotexport.model.state import State

Mode = Literal["train", "eval", "function"]

Attribute = tuple[nn.Module, str, Any]
"""A module, the name of an attribute of it, and a value."""


@contextlib.contextmanager
def in_mode(module: nn.Module | None, mode: Mode, attributes: Sequence[Attribute] = ()) -> Iterator[None]:
    """Put `module` in `mode`, and every submodule back in its own mode afterwards.

    A module that is in this mode already is left alone: submodules that the user froze stay frozen.

    Args:
        module: the module; None: a function.
        mode: the mode.
        attributes: attributes to set, and to put back.
    """
    if module is None:
        yield
        return
    before = [(child, "training", child.training) for child in module.modules()]
    before += [(child, name, getattr(child, name)) for child, name, _ in attributes]
    with _switched(module, mode == "train"):
        for child, name, value in attributes:
            setattr(child, name, value)
        try:
            yield
        finally:
            for child, name, value in before:
                setattr(child, name, value)


def only_mode(module: nn.Module | None) -> Literal["train", "eval"] | None:
    """Return the mode that a module of `torch.export` was exported in, the only one that it has; None: it has both.

    Graphs do not record it. It is train mode where an operator that tells them apart, such as dropout, was traced so.
    """
    children = [] if module is None else list(module.modules())
    if not any(
        getattr(vars(child).get("train"), "__module__", "") == "torch.export.exported_program" for child in children
    ):
        return None
    nodes = (node for child in children if isinstance(child, GraphModule) for node in child.graph.nodes)
    return "train" if any(map(_trains, nodes)) else "eval"


def _trains(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return any(values.get(name) is True for name in ("train", "training")) or bool(values.get("dropout_p"))


def eval_mode_note(module: nn.Module | None, mode: Mode) -> list[str]:
    """Return a sentence that names the submodules that stay in eval mode when `module` is in train mode, if any do."""
    if module is None or mode != "train" or not module.training:
        return []
    found = [name for name, child in module.named_modules() if name and not child.training]
    outermost = [f"`{name}`" for name in found if name.rpartition(".")[0] not in found]
    if not outermost:
        return []
    more = f" and {len(outermost) - 3} more" if len(outermost) > 3 else ""
    return [
        f"in eval mode, as the model has them: {', '.join(outermost[:3])}{more}; their dropout and batch statistics do "
        "not train. Call `.train()` on the whole model in the model file to train all of it"
    ]


@contextlib.contextmanager
def _switched(module: nn.Module, training: bool) -> Iterator[None]:
    """Switch the mode if needed; put back attributes that the user's own `train` sets."""

    def switch() -> None:
        # Modules made by `torch.export` have one mode only, and raise.
        with contextlib.suppress(NotImplementedError):
            module.train() if training else module.eval()

    if module.training == training:
        yield
    elif _any_has_own_switches(module):
        before = Attributes.of(module)
        undo = before.put_back
        try:
            switch()
            undo = before.undoing()
            yield
        finally:
            undo()
    else:
        switch()
        yield


def has_own_switches(module: nn.Module) -> bool:
    """Return whether a module, its submodules aside, has a `train` or `eval` of its own."""
    return any(
        getattr(type(module), name) is not getattr(nn.Module, name) or name in vars(module)
        for name in ("train", "eval")
    )


def _any_has_own_switches(module: nn.Module) -> bool:
    return any(map(has_own_switches, module.modules()))


def refuse_modes_that_change_state(module: nn.Module | None, mode: Mode, state: State) -> None:
    """Refuse a module whose own `train` or `eval` changes its tensors, such as by merging weights.

    Raises:
        ExportFailed: names the tensor.
    """
    if module is None or module.training == (mode == "train") or not _any_has_own_switches(module):
        return
    with restored(state) as snapshot, in_mode(module, mode):
        entries = [entry for entry in state.entries for _ in entry.slots]
        for entry, change in zip(entries, snapshot.changes(), strict=True):
            if change is not UNCHANGED:
                raise ExportFailed(
                    f"`{mode}()` of the model changes its `{entry.names[0]}`, and a bundle has one set of tensors for "
                    "all modes. Export the programs of one mode, with the model in that mode (`model.eval()`, then "
                    "`programs=('infer',)`)"
                )
