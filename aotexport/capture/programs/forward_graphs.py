"""The forward graph of each program; programs share a trace if nothing in the model's code tells them apart."""

from __future__ import annotations

from typing import Any

from torch import nn

from aotexport.capture.forward import capture_forward
from aotexport.capture.passes.order import program_dumped
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.capture.trace.shapes import SizeFixed
from aotexport.eager.run import copies, eager_run
from aotexport.model.call import Attribute, ExampleCall
from aotexport.model.programs import Mode, ProgramSpec
from aotexport.model.state import State
from aotexport.model.structure import flattened
from aotexport.state.mode import in_mode
from aotexport.state.world import AttributeChanged, PythonStateChanged
from aotexport.values.same_tensors import are_same


class StateReshaped(Exception):
    """The call changes the shape, dtype or layout of state, which `State.reshaped` has not had before."""


class ForwardGraphs:
    """Captures forward graphs over one state."""

    def __init__(self, state: State, *, captured: bool = False) -> None:
        """Begin with nothing to share.

        Args:
            state: the module's state; constants that traces find are added.
            captured: whether programs over it have been captured before.
        """
        self._state = state
        self._shared: list[tuple[ProgramSpec, ForwardCapture]] = []
        self._captured = captured

    def capture(self, spec: ProgramSpec) -> ForwardCapture:
        """Return the forward graph of a program.

        Raises:
            ExportFailed: it cannot be captured; says why.
            PythonStateChanged: the call cannot be followed through the values that it stores in attributes.
            StateReshaped: the call changes the shape of state, and earlier programs do not know.
        """
        for earlier, forward in self._shared:
            if _serves(earlier, spec):
                return forward
        known = len(self._state.entries)
        forward = self._trace(spec)
        self._note_reshaped(forward)
        self._captured = True
        if _tells_nothing_apart(forward) and len(self._state.entries) == known:
            self._shared.append((spec, forward))
        return forward

    def _note_reshaped(self, forward: ForwardCapture) -> None:
        """Note state that the program leaves with another shape, for the other programs."""
        noted = [entry for entry, _ in self._state.reshaped]
        new = [pair for pair in forward.function.reshaped if all(pair[0] is not entry for entry in noted)]
        self._state.reshaped += new
        if new and self._captured:
            raise StateReshaped(new[0][0].names[0])

    def _trace(self, spec: ProgramSpec) -> ForwardCapture:
        while True:
            try:
                with in_mode(spec.call.module, spec.mode, spec.call.first_call_constants), program_dumped(spec.name):
                    forward = capture_forward(spec.call, self._state, grad=spec.grad)
            except AttributeChanged as change:
                if not _add_first_call_constants(spec.call, self._state, spec.mode, change):
                    raise PythonStateChanged([change.changes[0][0]], str(change)) from change
            except SizeFixed as error:
                if spec.variant_of is None:
                    raise
                raise SizeFixed(f"variant `{spec.name}` of program `{spec.variant_of}`: {error}") from error
            else:
                forward.effects.notes += _note(spec.call)
                return forward


def _tells_nothing_apart(forward: ForwardCapture) -> bool:
    """Return whether the model's code does the same with and without gradients: programs of one mode share its graph.

    Sizes must be static: assumptions of a functional graph about sizes are recorded with its own forward graph.
    """
    effects, environment = forward.effects, forward.fakes.mode.shape_env
    assert environment is not None
    seen = effects.reads or effects.autograd_functions or effects.takes_gradients or effects.sets_requires_grad
    seen = seen or effects.stored or effects.notes or effects.questions.asked or not effects.above_autograd
    return not (seen or environment.var_to_range) and forward.function.strategy.is_direct


def _serves(earlier: ProgramSpec, spec: ProgramSpec) -> bool:
    """Return whether `spec` makes the call of `earlier` in its modes, and records gradients only if that does."""
    same = earlier.mode == spec.mode and earlier.autocast == spec.autocast
    return same and (earlier.grad or not spec.grad) and _is_same(earlier.call, spec.call)


def _is_same(one: ExampleCall, other: ExampleCall) -> bool:
    """Return whether two calls are of one callable with identical arguments, of static sizes."""
    values = [*zip(one.args, other.args, strict=False), *zip(one.tensors, other.tensors, strict=False)]
    values += [(value, other.kwargs.get(key)) for key, value in one.kwargs.items()]
    return (
        one.callable == other.callable
        and (len(one.args), [*one.kwargs], one.paths) == (len(other.args), [*other.kwargs], other.paths)
        and all(first is second for first, second in values)
        and not any((*one.axes, *other.axes, *one.first_call_constants, *other.first_call_constants))
    )


def _add_first_call_constants(call: ExampleCall, state: State, mode: Mode, change: AttributeChanged) -> bool:
    """Add attributes that a call changes (`self.prepared = True`) to its constants, if that alters nothing else.

    The example is called with the attributes' old values and with the new ones. Outputs and state must be equal, and
    both calls must leave the new values. If these are not, the first attribute is tried alone.

    Returns whether one was added.
    """
    names = [name for name, _, _ in change.changes]
    if call.module is None or any(_path(call.module, known) in names for known in call.first_call_constants):
        return False
    before, after = [], []
    for name, old, new in change.changes:
        path, _, attribute = name.rpartition(".")
        owner = call.module.get_submodule(path)
        before.append((owner, attribute, old))
        after.append((owner, attribute, new))
    for count in dict.fromkeys((len(names), 1)):
        first, left = _outcome(call, state, mode, before[:count])
        later, same = _outcome(call, state, mode, after[:count])
        if left == same == after[:count] and len(first) == len(later) and all(map(are_same, first, later)):
            call.first_call_constants += after[:count]
            return True
    return False


def _note(call: ExampleCall) -> list[str]:
    """Return a sentence per constant of the first call, for the user."""
    assert call.module is not None or not call.first_call_constants
    return [
        f"the first call sets the attribute `{_path(call.module, known)}` of the model to {known[2]!r}, which changes "
        "nothing else: the bundle does what later calls do"
        for known in call.first_call_constants
        if call.module is not None
    ]


def _path(module: nn.Module, attribute: Attribute) -> str:
    owner, name, _ = attribute
    path = next(path for path, child in module.named_modules() if child is owner)
    return f"{path}.{name}" if path else name


def _outcome(
    call: ExampleCall, state: State, mode: Mode, attributes: list[Attribute]
) -> tuple[list[Any], list[Attribute]]:
    """Return outputs, inputs and changed state of a call for real with attributes, and the attributes after it."""
    with eager_run(call, state, mode, seed=0, outside=True, attributes=attributes) as run:
        tree, values = flattened(run(), "output", role="output")
        left = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
        return [tree, *copies(values), *copies(run.tensors), *run.snapshot.changes()], left
