"""From a program to an ONNX model in memory, by torch's exporters: without changes and aliases, which ONNX lacks."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common as rules
from torch.export import Dim, ExportedProgram, default_decompositions

from aotexport.errors import AttemptFailed, ExportFailed
from aotexport.lower.onnx.draws import TRANSLATIONS
from aotexport.lower.onnx.plain import plain
from aotexport.lower.onnx.rebuild import Rebuilt, failing_step, origin
from aotexport.lower.targets import OnnxOptions
from aotexport.model.programs import affine, scaled
from aotexport.model.refusals import attempt
from aotexport.process.blocks import quiet
from aotexport.torch_internals.general_sizes import zero_and_one_symbolic
from aotexport.torch_internals.names import OpOverload
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import first_line
from aotexport_runtime.schema.manifest import step_program
from aotexport_runtime.schema.program import ArgumentInput, Program, StateInput
from aotexport_runtime.schema.sizes import Size
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.sizes import evaluate

Translations = Mapping[Any, Callable[..., Any]]
"""ONNX Script functions by the operator of torch that they translate."""

_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")

# Of the rules of `onnxscript.optimizer.optimize`, others take numbers within 1e-8 of 0 for 0, or are runtimes' own.
_RULES = (
    rules.no_op_transpose_rule,
    rules.reshape_reshape_rule,
    rules.squeeze_reshape_1d_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
)
_CLEANED = ir.passes.Sequential(
    RewritePass(_RULES),
    passes.IdentityEliminationPass(),
    passes.RemoveUnusedNodesPass(),
    passes.RemoveUnusedFunctionsPass(),
    passes.RemoveUnusedOpsetsPass(),
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    passes.LiftSubgraphInitializersToMainGraphPass(),
    passes.DeduplicateInitializersPass(),
    passes.CommonSubexpressionEliminationPass(),
    passes.OutputFixPass(),
    passes.NameFixPass(),
)

_EINSUM = torch.ops.aten.einsum.default
_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")


Trace = tuple[Program, Rebuilt, ExportedProgram]
"""A program in plain tensors, its rebuilt graph, and the trace of that by `torch.export`."""


def traced(bundle: Bundle, program: Program, options: OnnxOptions) -> Trace:
    """Return `program` in plain tensors, its rebuilt graph, and the trace of that by `torch.export`.

    `ExportFailed`: it cannot be translated, or changes or aliases tensors and the options do not allow it.
    """
    refuses = options.state == "refuse" and program.name != step_program(bundle.manifest)
    if refuses:
        _refuse_aliases(bundle, program)
    taken = plain(bundle, program)
    program, namespaces = taken[0], bundle.manifest.requirements.operator_namespaces
    rebuilt = Rebuilt(*taken, namespaces=namespaces)
    exported = _capture(program, rebuilt)
    updated = _updated(program, rebuilt, exported) if rebuilt.may_write else []
    if not updated:
        return program, rebuilt, exported
    if refuses:
        raise _Stateful(program, f"changes {', '.join(f'`{name}`' for name in updated)}")
    rebuilt = Rebuilt(*taken, namespaces=namespaces, updated=updated)
    return program, rebuilt, _capture(program, rebuilt)


class _Stateful(ExportFailed):
    def __init__(self, program: Program, change: str) -> None:
        super().__init__(
            f"program `{program.name}` {change}, and ONNX models change nothing. Give `--onnx-state=outputs` "
            "(`OnnxOptions(state='outputs')`) to have the new values as further outputs, and views as copies"
        )


def _refuse_aliases(bundle: Bundle, program: Program) -> None:
    """Refuse rebound state, and outputs that share memory with other tensors in the recorded calls."""
    if program.rebinds:
        raise _Stateful(program, f"replaces {', '.join(f'`{rebind.name}`' for rebind in program.rebinds)}")
    for entry in bundle.manifest.testvectors:
        if entry.program != program.name:
            continue
        facts = bundle.vector(entry).facts
        for name, fact in facts.items():
            path, mark, _ = name.partition(" shares memory with")
            if mark:
                raise _Stateful(program, f"returns `{path.rpartition(': ')[2]}` as a view of `{fact}`")


def _updated(program: Program, rebuilt: Rebuilt, exported: ExportedProgram) -> list[str]:
    """Return the names of the state tensors and the paths of the arguments that the traced graph writes to."""
    written = _functional(program, exported)
    signature = written.graph_signature
    shapes = {node.name: getattr(node.meta.get("val"), "shape", None) for node in written.graph.nodes}
    for result, name in {**signature.user_inputs_to_mutate, **signature.buffers_to_mutate}.items():
        placeholder = next((key for key, value in signature.inputs_to_buffers.items() if value == name), name)
        if shapes[result] != shapes[placeholder]:
            raise ExportFailed(
                f"program `{program.name}` changes values and sizes of a tensor at once, which has no ONNX "
                "form. Let it change values alone"
            )
    arguments = [spec for spec in program.inputs if not isinstance(spec, StateInput)]
    paths = {spec.path for spec in arguments}
    state = [rebuilt.state[name.rpartition(".")[2]] for name in signature.buffers_to_mutate.values()]
    order = list(signature.user_inputs)
    changed = [arguments[order.index(name)].path for name in signature.user_inputs_to_mutate.values()]
    ambiguous = [name for name in (*state, *changed) if name in rebuilt.state.values() and name in paths]
    if ambiguous:
        raise ExportFailed(
            f"program `{program.name}` changes `{ambiguous[0]}`, the name of an argument and of a state tensor, and "
            "ONNX models have one name space. Rename the argument"
        )
    return [*state, *changed]


def _capture(program: Program, rebuilt: Rebuilt) -> ExportedProgram:
    """Return the module traced by `torch.export`, dynamic sizes as the program has them."""
    # Torch treats 0 and 1 as special.
    symbols = {
        d.symbol: min(max(d.min or 0, 5 + 2 * i), d.max if d.max is not None else 1 << 30)
        for i, d in enumerate(program.dimensions)
    }
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
            exported = torch.export.export(
                rebuilt,
                tuple(args),
                dynamic_shapes=(tuple(shapes),) if shapes else None,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            # ONNX Runtime 1.32 computes `Einsum` of a size 0 by a division by zero, which ends the process.
            graphs = [each.graph for each in exported.graph_module.modules() if isinstance(each, torch.fx.GraphModule)]
            has_einsum = any(graph.find_nodes(op="call_function", target=_EINSUM) for graph in graphs)
            table = {_EINSUM: default_decompositions()[_EINSUM]}
            return exported.run_decompositions(table) if has_einsum else exported
    except AttemptFailed as refusal:
        operator, where = origin(failing_step(_frames(refusal.error)))
        reason = _reason(refusal.error)
        at = f" at `{operator}`" if operator else ""
        raise ExportFailed(
            f"program `{program.name}` has no ONNX form: torch.export refuses its graph{at}{where}: {reason}"
        ) from refusal.error


def _functional(program: Program, exported: ExportedProgram) -> ExportedProgram:
    """Return a traced program without writes; its signature names the changed tensors."""
    try:
        with attempt("functional form for ONNX"), _untouched_sizes():
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


def _dim(size: Size, dims: Mapping[str, Any]) -> Any:
    """Return `size` for `torch.export`: None if it is fixed, a named dimension, or a linear expression of one."""
    if isinstance(size, int):
        return None
    if (linear := affine(size)) is None:
        return Dim.AUTO
    symbol, factor, offset = linear
    return scaled(dims[symbol], factor, offset) if symbol in dims else None


def translate(
    program: Program, exported: ExportedProgram, rebuilt: Rebuilt, *, opset: int, translations: Translations
) -> ir.Model:
    """Return the optimised ONNX model of a traced program; `ExportFailed`: an operator has no translation.

    The state tensors are inputs of the model, after those of the program and with the names in `rebuilt.state`, so that
    they are not folded into constants.
    """
    try:
        with quiet(*_LOGGERS), torch.no_grad():
            converted: Any = torch.onnx.export(
                exported,
                dynamo=True,
                verbose=False,
                optimize=False,
                opset_version=opset,
                custom_translation_table={**TRANSLATIONS, **translations},
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
    model: ir.Model = converted.model
    with quiet(*_LOGGERS):
        passes.InlinePass()(model)
        fold_constants_ir(model, onnx_shape_inference=True)
        _CLEANED(model)
    _refuse_random(program, model)
    if model.opset_imports.get("") != opset:
        raise ExportFailed(
            f"program `{program.name}` has no form of operator set {opset}: torch's exporter gives "
            f"{model.opset_imports.get('')}. Choose --opset {model.opset_imports.get('')}"
        )
    return model


def _untranslated(program: Program, error: BaseException) -> str:
    """Return a message that names the node without a translation, its place in the user's code, and a way out."""
    values = [frame.f_locals.get(name) for frame in _frames(error) for name in ("node", "n")]
    nodes = [value for value in values if isinstance(value, torch.fx.Node) and value.op == "call_function"]
    node, reason = nodes[-1] if nodes else None, _reason(error)
    if node is None:
        return f"program `{program.name}` has no ONNX form: {reason}"
    operator, where = origin(node.meta.get("stack_trace"))
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


def _frames(error: BaseException | None) -> list[FrameType]:
    if error is None:
        return []
    return [*(frame for frame, _ in traceback.walk_tb(error.__traceback__)), *_frames(error.__cause__)]


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    reason = first_line(error)
    return "torch's exporter has none" if reason.startswith("No ONNX function found") else reason


def _name_sizes(program: Program, exported: ExportedProgram, converted: Any) -> None:
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
