"""`torch.export`: the yardstick for what an export may cost, and the module that it gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.models import Model, by_position
from benchmarks.systems.interface import Mode, Prepared, System


def exported(model: Model, mode: Mode) -> Any:
    """Return the exported program of a mode."""
    from torch.export import export

    args, kwargs = by_position(model.inputs())
    sizes = model.sizes and model.sizes()
    return export(model.module().train(mode == "train"), args, kwargs, dynamic_shapes=sizes)


def _prepare(model: Model, directory: Path) -> Prepared:
    exported(model, "train")
    return Prepared()


TORCH_EXPORT = System(
    "torch.export", "torch.export.export, in the suite `export` alone", artefact="program", prepare=_prepare
)


def _prepare_graphs(model: Model, directory: Path) -> Prepared:
    for mode, grad in (("train", True), ("infer", False)):
        _functional_graph(exported(model, mode), grad=grad)
    return Prepared()


def _functional_graph(program: Any, *, grad: bool) -> Any:
    """Return AOTAutograd's functional graph of an exported program, of its forward and backward if `grad`."""
    import torch
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # noqa: TID251
    from torch._guards import TracingContext, tracing  # noqa: TID251
    from torch.utils._pytree import tree_leaves, tree_unflatten  # noqa: TID251

    module = program.module()

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *flat: Any) -> Any:
            args, kwargs = tree_unflatten(flat, program.call_spec.in_spec)
            return tree_leaves(self.module(*args, **kwargs))

    inputs = program.graph_signature.user_inputs
    placeholders = program.graph.find_nodes(op="placeholder")
    fakes = tuple(node.meta["val"] for node in placeholders if node.name in inputs)
    mode = next(fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode"))
    with ExitStack() as stack, tracing(TracingContext(mode)), torch.set_grad_enabled(grad):
        return aot_export_joint_with_descriptors(stack, Flat(), fakes, {}, ignore_shape_env=True)


TORCH_GRAPHS = System(
    "torch's traces",
    "torch.export of both modes and AOTAutograd of both programs, one after the other, nothing written or verified",
    artefact="graphs",
    prepare=_prepare_graphs,
)


def _prepare_module(model: Model, directory: Path) -> Prepared:
    import torch

    directory.mkdir(exist_ok=True)
    for mode in ("train", "infer"):
        torch.export.save(exported(model, mode), directory / f"{mode}.pt2")
    return Prepared()


def _load_module(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    import torch

    if model.classes:
        importlib.import_module(model.classes)
    return torch.export.load(directory / f"{mode}.pt2").module()


EXPORTED_MODULE = System(
    "export module",
    "the module of a torch.export program, from a .pt2 file per mode",
    artefact="pt2",
    prepare=_prepare_module,
    load=_load_module,
    exports=False,
)
