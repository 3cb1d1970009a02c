"""A file of `torch.export.save` (`.pt2`) as the source of an export; its pickles are read with `weights_only`."""

from __future__ import annotations

import inspect
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from aotexport.errors import ModelFileInvalid
from aotexport.model.model_file import user_code
from aotexport.model.programs import Example, ModelSource, scaled
from aotexport.process.patches import Patch, patched


def exported_source(where: str) -> ModelSource:
    """Return the model, example call and dynamic sizes of the `.pt2` file at a path.

    `ModelFileInvalid`: there is no such file, torch cannot read it, or it has no example inputs.
    """
    path = Path(where)
    program = _loaded(path)
    if program.example_inputs is None:
        raise ModelFileInvalid(
            f"`{where}` has no example inputs. Export a model file that has them:\n\n"
            f'    model = torch.export.load("{where}").module()\n    example_inputs = (torch.randn(2, 8),)'
        )
    module: Any = program.module()
    example = Example(*program.example_inputs, _dynamic_shapes(program, module))
    return ModelSource(where, module, example, path.absolute().parent)


def _loaded(path: Path) -> ExportedProgram:
    if not path.is_file():
        raise ModelFileInvalid(f"no file `{path}`")
    if not zipfile.is_zipfile(path):
        raise ModelFileInvalid(f"`{path}` is no file of `torch.export.save`: it is no zip archive, or is cut off")
    with zipfile.ZipFile(path) as archive:
        if any("data/aotinductor/" in name for name in archive.namelist()):
            raise ModelFileInvalid(
                f"`{path}` holds code that AOTInductor compiled; export what `torch.export` returned"
            )
    reason = "Refuse pickles that may run any code, which torch falls back to"
    with (
        patched(Patch(os.environ, "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1", reason)),
        user_code(f"reading `{path}` by `torch.export.load`", path.absolute().parent),
    ):
        return torch.export.load(path)


def _dynamic_shapes(program: ExportedProgram, module: Any) -> dict[str, Any] | None:
    """Return the dynamic sizes of a program in the form of `torch.export.export`; None: there are none."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    dimensions: dict[Any, Any] = {}
    sizes = [_sizes(values.get(spec.arg.name), program, dimensions) for spec in specs]
    if not dimensions or program.call_spec.in_spec is None:
        return None
    args, kwargs = program.call_spec.in_spec.unflatten(sizes)
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def _sizes(value: Any, program: ExportedProgram, dimensions: dict[Any, Any]) -> Any:
    """Return the dynamic sizes of an argument: by axis of a tensor, or of an integer its own; None: there are none."""
    if isinstance(value, torch.SymInt):
        return _dimension(value, program, dimensions)
    shape = enumerate(value.shape) if isinstance(value, torch.Tensor) else ()
    return {axis: _dimension(n, program, dimensions) for axis, n in shape if isinstance(n, torch.SymInt)} or None


def _dimension(size: torch.SymInt, program: ExportedProgram, dimensions: dict[Any, Any]) -> Any:
    """Return the dimension of a symbol, or of a symbol times a factor plus an offset; others are left to the export."""
    expression: Any = size.node.expr
    symbol, *others = expression.free_symbols
    factor, offset = expression.coeff(symbol), expression.subs(symbol, 0)
    if others or expression != factor * symbol + offset:
        return Dim.AUTO
    if symbol not in dimensions:
        bounds = program.range_constraints[symbol]
        most = int(bounds.upper) if bounds.upper.is_Integer else None
        dimensions[symbol] = Dim(str(symbol), min=int(bounds.lower), max=most)
    return scaled(dimensions[symbol], int(factor), int(offset))
