"""The functional graph, joint or inference, captured by AOTAutograd."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from aotexport.capture.effects.applied_function import AppliedFunction, apply_function
from aotexport.capture.effects.checkpoints import enter_checkpoint
from aotexport.capture.effects.grad_mode import marked_regions
from aotexport.capture.effects.hooks import apply_hook
from aotexport.capture.effects.recurrence import LAYERS, PACKED, STAND_INS, put_back, unfit_layer
from aotexport.capture.functional.mutating_operators import nest_mutating_call
from aotexport.capture.functional.retrace import Retrace, hidden_values
from aotexport.capture.passes.launches import name_launch
from aotexport.capture.trace.example_values import ExampleValues
from aotexport.capture.trace.fake_kernels import FAKE_KERNELS
from aotexport.capture.trace.fakes import is_sized_alike
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.capture.trace.reading_values import READING_FUNCTIONS
from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import described
from aotexport.model.state import swapped
from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.calls import memory_of, tensors_in
from aotexport.torch_internals.checks import insert_data_dependent_checks, unchecked_assumption
from aotexport.torch_internals.functional import FunctionalCapture, capture_functional
from aotexport.torch_internals.launches import LAUNCHES, triton_target
from aotexport.torch_internals.names import MemoryFormatMeta, statically_known_true
from aotexport.torch_internals.patches import onednn_disabled
from aotexport.torch_internals.subgraphs import FUNCTIONALISED
from aotexport.torch_internals.tracing import REQUIRES_GRAD, current_tracer, is_of_backward, node_meta_preserved
from aotexport_runtime.execution.autocast import autocast_dtype


@dataclass(frozen=True)
class Refused:
    """Why there is no functional graph; the program then runs its forward graph."""

    reason: str


def capture_functional_graph(
    forward: ForwardCapture,
    *,
    grad: bool,
    instead: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    launches: bool = False,
    count: Callable[[int, int], None] = lambda done, of: None,
) -> FunctionalCapture | Refused:
    """Capture the functional graph of a traced program.

    Args:
        forward: the program before autograd, the source of the functional graph.
        grad: joint graph; False: inference graph.
        instead: functions to trace in place of operators of the forward graph; called with the operator's result in
            that graph, a fake tensor, before the arguments.
        launches: for torch's compiler: decompose operators of Triton kernels, see `capture_functional`, and leave
            launches, and calls of custom operators that write to their arguments, in the form that compiler takes.
        count: called with the number of the forward graph's nodes that are traced, and of all.
    """
    inputs = forward.inputs
    grad = grad and any(fake.requires_grad for fake in inputs if isinstance(fake, torch.Tensor))
    if (unfit := _unfit(forward, grad)) is not None:
        return Refused(unfit)
    if not (grad or launches):
        instead = {**_RECURRENCE_WHOLE, **instead}
    try:
        # A joint graph is traced below autograd, with grad mode off. Torch would pick recurrent kernels that eager
        # training does not use and whose backward lacks gradients, and guard on sizes to pick a convolution kernel.
        kernels = onednn_disabled() if grad else contextlib.nullcontext()
        # Triton finds the arguments that a kernel writes to by compiling it for a device.
        target = triton_target() if forward.launched else contextlib.nullcontext()
        with (
            attempt("functional graph"),
            forward.fakes.tracing(),
            kernels,
            target,
            _contiguous_tangents(),
            _traced(forward, instead, count, grad=grad) as traced,
        ):
            twins, mode = forward.fakes.twins(inputs), forward.fakes.mode
            captured = capture_functional(traced, twins, mode, kernels=FAKE_KERNELS, grad=grad, launches=launches)
            if not launches:
                _put_in_form(captured.module)
            assumed = _checked(forward, captured)
            unfit = _undefined_gradients(forward, captured) if grad else None
    except ExportFailed as refusal:
        return Refused(described(refusal.error))
    if unfit is not None:
        return Refused(unfit)
    return captured if assumed is None else Refused(f"it assumes `{assumed}`, which the forward graph does not check")


def _unfit(forward: ForwardCapture, grad: bool) -> str | None:
    """Return why a forward graph has no functional graph; None: nothing is known to be in its way."""
    devices = {fake.device.type for fake in forward.inputs if isinstance(fake, torch.Tensor)}
    if any(autocast_dtype(device) is not None for device in devices):
        return "autocast surrounds the capture; for a graph of its operators, have its region inside of the model"
    if forward.effects.sets_requires_grad:
        return "the model calls `requires_grad_`"
    # Its guards compare strides of the module's tensors, and no sizes.
    if not all(is_sized_alike(entry.tensor, left) for entry, left in forward.function.state.reshaped):
        return "calls change the shape or dtype of the module's tensors"
    reasons = itertools.chain(
        map(_unfit_output, forward.graph.graph.nodes),
        (unfit(node, grad) for target, unfit in _UNFIT.items() for node in _calls(forward, target)),
    )
    return next(filter(None, reasons), None)


def _unfit_detach(node: torch.fx.Node, grad: bool) -> str | None:
    detaches = isinstance(node.args[0], torch.fx.Node) and node.args[0].op == "placeholder"
    return "the model calls `detach_` on an input" if detaches else None


def _unfit_with_gradients(reason: str) -> Callable[[torch.fx.Node, bool], str | None]:
    return lambda node, grad: reason if grad else None


def _unfit_view(node: torch.fx.Node, grad: bool) -> str | None:
    """Return a reason if torch's backward of a view would turn a dynamic size into a number."""
    tensor, view = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    dynamic = any(isinstance(value, torch.SymInt) for value in (*tensor.size(), *view.size(), *view.stride()))
    overlaps = _overlaps(view.size(), view.stride()) and not _overlaps(tensor.size(), tensor.stride())
    reason = "its backward of an overlapping view (`as_strided`) would hold a dynamic size to the example's"
    return reason if grad and node.meta.get(REQUIRES_GRAD) and dynamic and overlaps else None


def _unfit_output(node: torch.fx.Node) -> str | None:
    """Return a reason if an operator gives another shape to an input, or to a view of one, as its `out`.

    AOTAutograd writes the result to the input, and leaves the input's shape as it was.
    """
    schema = getattr(node.target, "_schema", None)
    outputs = [] if schema is None else [argument.name for argument in schema.arguments if argument.is_out]
    for name, result in zip(outputs, tensors_in(node.meta.get("val")) if outputs else (), strict=False):
        given = node.kwargs.get(name)
        inputs = [each for put in node.graph.find_nodes(op="placeholder") for each in tensors_in(put.meta.get("val"))]
        for written in tensors_in(given.meta.get("val")) if isinstance(given, torch.fx.Node) else ():
            if not is_sized_alike(written, result) and memory_of(result) in map(memory_of, inputs):
                return f"`{node.target}` gives an input another shape"
    return None


_UNFIT: dict[Any, Callable[[torch.fx.Node, bool], str | None]] = {
    torch.ops.aten.detach_.default: _unfit_detach,
    **dict.fromkeys((*LAYERS, *PACKED), unfit_layer),
    torch.ops.aten.as_strided.default: _unfit_view,
    apply_hook: _unfit_with_gradients(
        "the model registers hooks on tensors, which would see parts of the gradients that eager's see"
    ),
    enter_checkpoint: _unfit_with_gradients(
        "the model recomputes checkpointed parts in backward, and a joint graph saves what it needs"
    ),
}
"""By what a node calls: the reason why a joint (True) or inference graph cannot hold it; None: it can."""
_RECURRENCE_WHOLE = {layer: lambda result, *args, whole=whole: whole(*args) for layer, whole in STAND_INS.items()}
_FORMS: dict[Any, Callable[[torch.fx.GraphModule, torch.fx.Node], None]] = {
    **dict.fromkeys(STAND_INS.values(), put_back),
    **dict.fromkeys(LAUNCHES, name_launch),
    FUNCTIONALISED: nest_mutating_call,
}
"""What puts a node in the form that a record holds, by what it calls."""


def _put_in_form(module: torch.fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.target in _FORMS:
            _FORMS[node.target](module, node)
    module.recompile()


def _undefined_gradients(forward: ForwardCapture, captured: FunctionalCapture) -> str | None:
    """Return why a joint graph does not serve losses of some outputs: it has zeros for the gradients of the others."""
    takes_some = forward.effects.takes_some_gradients
    for node in _calls(forward, apply_function):
        function = AppliedFunction(*node.args[4:])  # type: ignore[arg-type]
        used = [user for user in node.users if user.args[1] not in function.nondifferentiable]
        takes_some = takes_some or (not function.materializes and len(used) > 1)
    tangents = sum(map(is_of_backward, captured.module.graph.find_nodes(op="placeholder")))
    if not takes_some or tangents < 2:
        return None
    return "the backward of a custom autograd function takes undefined gradients (`set_materialize_grads(False)`)"


def _checked(forward: ForwardCapture, captured: FunctionalCapture) -> Any | None:
    """Return an assumption about data-dependent numbers that the functional graph does not check; None: no such one.

    A graph traced from the forward graph has its checks. A graph traced from the code has none, so they are inserted.
    """
    environment = forward.fakes.mode.shape_env
    assert environment is not None
    if forward.effects.autograd_functions:
        _make_scalars(captured.module.graph)
        insert_data_dependent_checks(captured.module, environment)
        return None
    return unchecked_assumption(forward.graph, captured.module, environment)


def _calls(forward: ForwardCapture, operator: Any) -> list[torch.fx.Node]:
    return list(forward.graph.graph.find_nodes(op="call_function", target=operator))


def _make_scalars(graph: torch.fx.Graph) -> None:
    """Let a graph make the tensors of one number that code makes by `torch.tensor`: they are no inputs."""
    for node in graph.find_nodes(op="get_attr"):
        tensor = getattr(graph.owning_module, str(node.target))
        is_copied = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if is_copied and isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
            options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
            with graph.inserting_before(node):
                made = graph.call_function(torch.ops.aten.full.default, ([*tensor.shape], tensor.item()), options)
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


@contextlib.contextmanager
def _traced(
    forward: ForwardCapture, instead: Mapping[Any, Callable[..., Any]], count: Callable[[int, int], None], *, grad: bool
) -> Iterator[Callable[..., Any]]:
    """Yield the function to capture: the forward graph, or the code itself where only that has the backward."""
    if forward.effects.autograd_functions:
        with _code(forward) as flat:
            yield flat
        return
    graph = forward.graph
    for node in graph.graph.nodes:
        node.meta["custom"] = {**(node.meta.get("custom") or {}), "origin": node.name}
    hidden = hidden_values(forward, instead, grad=grad)

    def run(*inputs: Any) -> Any:
        if current_tracer() is None:
            return Retrace(graph, instead, hidden=hidden).run(*inputs)
        with node_meta_preserved():
            return Retrace(graph, instead, count).run(*inputs)

    yield run


@contextlib.contextmanager
def _code(forward: ForwardCapture) -> Iterator[Callable[..., Any]]:
    """Yield the flat Python function, taking the forward graph's inputs; it follows the example's values."""
    flat, environment = forward.function, forward.fakes.mode.shape_env
    assert environment is not None
    entries, own = {id(entry): index for index, entry in enumerate(flat.state.entries)}, flat.own
    given = [flat.call.tensors[b.argument or 0] if b.entry is None else b.entry.tensor for b in forward.bindings]
    flat.values = ExampleValues(given, flat.values)
    backward = contextlib.ExitStack()

    def run(*inputs: Any) -> Any:
        backward.close()
        arguments: list[Any] = [*forward.fakes.twins(forward.fakes.state), *[None] * len(own)]
        for binding, value in zip(forward.bindings, inputs, strict=True):
            if binding.entry is None:
                assert binding.argument is not None
                arguments[len(entries) + own.index(binding.argument)] = value
            elif id(binding.entry) in entries:
                arguments[entries[id(binding.entry)]] = value
        with marked_regions():
            results = flat(*arguments)
        # A backward may read tensors of modules.
        backward.enter_context(swapped(flat.state, arguments[: len(entries)], flat.target))
        return results

    with flat.values.followed(environment), patched(*READING_FUNCTIONS), backward:
        yield run


def _contiguous_tangents() -> contextlib.AbstractContextManager[None]:
    """Trace the gradient of an output of overlapping elements as contiguous; AOTAutograd does so for expanded ones.

    Source: torch 2.13, `_functorch/_aot_autograd/schemas.py`, `MemoryFormatMeta.from_tensor`.
    """
    original = MemoryFormatMeta.from_tensor

    def from_tensor(t: torch.Tensor, force_use_memory_format: bool = False) -> MemoryFormatMeta | None:
        static = t.layout is torch.strided and all(isinstance(size, int) for size in (*t.size(), *t.stride()))
        return original(t, force_use_memory_format or (static and _overlaps(t.size(), t.stride())))

    reason = "Trace gradients of outputs whose elements overlap as contiguous"
    return patched(Patch(MemoryFormatMeta, "from_tensor", staticmethod(from_tensor), reason))


def _overlaps(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Return whether elements may share memory, as far as is known without a guard."""
    reached: Any = 0
    hints = [step.node.hint if isinstance(step, torch.SymInt) else step for step in stride]
    for _, step, length in sorted(zip(hints, stride, size, strict=True), key=lambda axis: axis[0]):
        if statically_known_true(length == 1):
            continue
        if not statically_known_true(step > reached):
            return True
        reached = reached + step * (length - 1)
    return False
