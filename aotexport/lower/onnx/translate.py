"""From a rebuilt forward graph to an ONNX model in memory, by torch's own exporter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import LiftConstantsToInitializersPass, LiftSubgraphInitializersToMainGraphPass
from torch.export import Dim, ExportedProgram

from aotexport.errors import AttemptFailed, ExportFailed
from aotexport.lower.onnx.provenance import origin
from aotexport.lower.onnx.rebuild import Rebuilt
from aotexport.model.refusals import attempt
from aotexport.process.blocks import quiet
from aotexport.torch_internals.general_sizes import zero_and_one_symbolic
from aotexport.torch_internals.names import OpOverload
from aotexport.torch_internals.onnx_translations import translations_read_once
from aotexport_runtime.errors import first_line
from aotexport_runtime.schema.program import ArgumentInput, Program, StateInput
from aotexport_runtime.schema.sizes import Size, SizeExpression
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.sizes import evaluate

OPSETS = range(18, 24)
"""Operator sets that torch's exporter can translate to."""

INLINE_NBYTES = 1024
"""Most bytes of a constant in the model file; larger ones are stored outside."""

Translations = Mapping[Any, Callable[..., Any]]
"""ONNX Script functions by the operator of torch that they translate."""

_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")

_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")


def capture(program: Program, rebuilt: Rebuilt) -> ExportedProgram:
    """Return the module traced by `torch.export`, dynamic sizes as the program has them."""
    symbols = example_sizes(program)
    # Torch's `Dim` cannot have a single size, nor a name that is no identifier, as that of an item of a list.
    dims = {
        d.symbol: Dim(d.name if d.name.isidentifier() else d.symbol, min=d.min, max=d.max)
        for d in program.dimensions
        if d.min is None or d.min != d.max
    }
    args: list[Any] = []
    shapes: list[Any] = []
    for spec in program.inputs:
        if isinstance(spec, ArgumentInput):
            shape = [evaluate(size, symbols) for size in spec.meta.shape]
            args.append(torch.zeros(shape, dtype=dtypes.dtype(spec.meta.dtype)))
            shapes.append({axis: _dim(size, dims) for axis, size in enumerate(spec.meta.shape)})
        elif not isinstance(spec, StateInput):
            args.append(symbols[spec.symbol])
            shapes.append(Dim.DYNAMIC)
    try:
        with attempt("trace for ONNX"), _untouched_sizes():
            return torch.export.export(
                rebuilt.module,
                tuple(args),
                dynamic_shapes=(tuple(shapes),) if shapes else None,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except AttemptFailed as refusal:
        node, reason = failing_node(refusal.error)
        operator, where = origin(node.meta.get("stack_trace")) if node is not None else ("", "")
        at = f" at `{operator}`" if operator else ""
        raise ExportFailed(
            f"program `{program.name}` has no ONNX form: torch.export refuses its graph{at}{where}: {reason}"
        ) from refusal.error


def functional(program: Program, exported: ExportedProgram) -> ExportedProgram:
    """Return a traced program without writes; its signature names the changed tensors."""
    try:
        with (
            attempt("functional form for ONNX"),
            torch.no_grad(),
            zero_and_one_symbolic(symbolic=True),
            quiet(*_LOGGERS),
        ):
            return exported.run_decompositions({})
    except AttemptFailed as refusal:
        raise ExportFailed(
            f"program `{program.name}` changes state or inputs in a way that has no ONNX form: sizes, strides or "
            f"storage, or memory that they share ({first_line(refusal.error)}). Give it tensors of their own, and let "
            "it write values alone"
        ) from refusal.error


@contextlib.contextmanager
def _untouched_sizes() -> Iterator[None]:
    """Fix no size of 0 or 1, as torch's own ONNX exporter; record no gradients, and let libraries be quiet."""
    with torch.no_grad(), zero_and_one_symbolic(symbolic=True), quiet(*_LOGGERS):
        yield


def example_sizes(program: Program) -> dict[str, int]:
    """Return a value per symbol that torch does not treat as special (0, 1), if its range allows."""
    return {
        d.symbol: min(max(d.min or 0, 5 + 2 * i), d.max if d.max is not None else 1 << 30)
        for i, d in enumerate(program.dimensions)
    }


def _dim(size: Size, dims: Mapping[str, Any]) -> Any:
    """Return `size` for `torch.export`: None if it is fixed, a named dimension, or a linear expression of one."""
    if isinstance(size, int):
        return None
    if isinstance(size, str):
        return dims.get(size)
    return _linear(size, dims) or Dim.AUTO


def _linear(size: SizeExpression, dims: Mapping[str, Any]) -> Any:
    if size.op not in ("add", "mul") or len(size.args) != 2:
        return None
    number, rest = sorted(size.args, key=lambda arg: not isinstance(arg, int))
    inner = (
        dims.get(rest) if isinstance(rest, str) else _linear(rest, dims) if isinstance(rest, SizeExpression) else None
    )
    if not isinstance(number, int) or inner is None:
        return None
    return inner * number if size.op == "mul" else inner + number


def translate(
    program: Program, exported: ExportedProgram, rebuilt: Rebuilt, *, opset: int, translations: Translations
) -> ir.Model:
    """Return the optimised ONNX model of a traced program.

    The state tensors are inputs of the model, after those of the program and with the names in `rebuilt.state`, so that
    they are not folded into constants.

    Raises:
        ExportFailed: an operator has no translation; names it with the user's line.
    """
    try:
        with quiet(*_LOGGERS), torch.no_grad(), translations_read_once():
            converted: Any = torch.onnx.export(
                exported,
                dynamo=True,
                verbose=False,
                optimize=False,
                opset_version=opset,
                custom_translation_table=dict(translations),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportFailed(_untranslated(program, error)) from error
    _name_sizes(program, exported, converted)
    graph = converted.model.graph
    for name in list(graph.initializers):
        attribute = name.rpartition(".")[2]
        if attribute in rebuilt.state:
            value = graph.initializers.pop(name)
            value.const_value = None
            value.name = attribute
            graph.inputs.append(value)
    with quiet(*_LOGGERS):
        converted.optimize()
        model: ir.Model = converted.model
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        LiftSubgraphInitializersToMainGraphPass()(model)
    _refuse_random(program, model)
    if model.opset_imports.get("") != opset:
        raise ExportFailed(
            f"program `{program.name}` has no form of operator set {opset}: torch's exporter gives "
            f"{model.opset_imports.get('')}. Choose --opset {model.opset_imports.get('')}"
        )
    return model


def _untranslated(program: Program, error: BaseException) -> str:
    """Return a message that names the node without a translation, its place in the user's code, and a way out."""
    node, reason = failing_node(error)
    if node is None:
        return f"program `{program.name}` has no ONNX form: {reason}"
    operator, where = origin(node.meta.get("stack_trace"))
    if str(node.target).startswith("auto_functionalized"):
        written = next(arg for arg in node.args if isinstance(arg, OpOverload))
        return (
            f"operator `{_shown(written)}`{where} of program `{program.name}` writes to its arguments, and no function "
            "of ONNX does. Give the model one that returns new values"
        )
    if not isinstance(node.target, OpOverload):
        name = operator or node.target
        return f"operator `{name}`{where} of program `{program.name}` has no translation to ONNX: {reason}"
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return _draws(operator or _shown(node.target), where, program)
    return (
        f"operator `{_shown(node.target)}`{where} of program `{program.name}` has no translation to ONNX: {reason}. "
        "Give one with `--onnx-translations FILE.py:NAME` (`OnnxOptions(translations=...)`): a dict from "
        f"`torch.ops.{node.target}` to an ONNX Script function"
    )


def _shown(operator: OpOverload) -> str:
    return str(operator).replace(".", "::", 1)


def failing_node(error: BaseException) -> tuple[torch.fx.Node | None, str]:
    """Return the node that the innermost possible frame of `error` worked on, and the innermost reason."""
    node, cause = None, error
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None:
            names = trace.tb_frame.f_locals
            candidate = next(
                (names[name] for name in ("node", "n") if isinstance(names.get(name), torch.fx.Node)), None
            )
            if candidate is not None and candidate.op == "call_function":
                node = candidate
            trace = trace.tb_next
        error, cause = cause, cause.__cause__
    reason = first_line(error)
    return node, "torch's exporter has none" if reason.startswith("No ONNX function found") else reason


def _name_sizes(program: Program, exported: ExportedProgram, converted: Any) -> None:
    """Give the model's symbolic sizes the user's names."""
    symbols: dict[str, str] = {}
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"]
    arguments = values[len(values) - sum(not isinstance(spec, StateInput) for spec in program.inputs) :]
    by_index = dict(
        zip((i for i, spec in enumerate(program.inputs) if not isinstance(spec, StateInput)), arguments, strict=True)
    )
    for dimension in program.dimensions:
        value = by_index[dimension.input_index]
        size = value.shape[dimension.axis] if isinstance(value, torch.Tensor) else value
        free = [str(symbol) for symbol in size.node.expr.free_symbols] if isinstance(size, torch.SymInt) else []
        if len(free) == 1:
            symbols[free[0]] = dimension.name
    if symbols:
        converted.rename_axes(symbols)


def _refuse_random(program: Program, model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        # `Dropout` draws if it has a third input.
        if node.op_type in _RANDOM or (node.op_type == "Dropout" and len(node.inputs) == 3):
            operator, where = origin(node.metadata_props.get("pkg.torch.onnx.stack_trace"))
            raise ExportFailed(_draws(operator or node.op_type, where, program))


def _draws(operator: str, where: str, program: Program) -> str:
    return (
        f"operator `{operator}`{where} of program `{program.name}` draws random numbers, which ONNX models draw "
        "otherwise; pass them in as an input"
    )
