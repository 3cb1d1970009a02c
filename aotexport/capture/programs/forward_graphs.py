"""The forward graph of each program; programs share a trace if nothing in the model's code tells them apart."""

from __future__ import annotations

from aotexport.capture.forward import capture_forward
from aotexport.capture.passes.dump import program_dumped
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.capture.trace.shapes import SizeFixed
from aotexport.eager.first_call import add_first_call_constants, note
from aotexport.model.attributes import AttributeChanged, PythonStateChanged
from aotexport.model.call import ExampleCall
from aotexport.model.mode import in_mode
from aotexport.model.programs import ProgramSpec
from aotexport.model.state import State


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
        """Note state that the program leaves with another shape, for the other programs.

        Raises:
            StateReshaped: programs were captured without knowing of it.
        """
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
                if not add_first_call_constants(spec.call, self._state, spec.mode, change):
                    raise PythonStateChanged([change.changes[0][0]], str(change)) from change
            except SizeFixed as error:
                if spec.variant_of is None:
                    raise
                raise SizeFixed(f"variant `{spec.name}` of program `{spec.variant_of}`: {error}") from error
            else:
                forward.effects.notes += note(spec.call)
                return forward


def _tells_nothing_apart(forward: ForwardCapture) -> bool:
    """Return whether the model's code does the same in every mode, so that programs can share its forward graph.

    Sizes must be static: assumptions of a functional graph about sizes are recorded with its own forward graph.
    """
    effects, environment = forward.effects, forward.fakes.mode.shape_env
    assert environment is not None
    seen = effects.reads or effects.autograd_functions or effects.takes_gradients or effects.sets_requires_grad
    seen = seen or effects.stored or effects.notes or effects.questions.asked or not effects.above_autograd
    return not (forward.asks_modes or seen or environment.var_to_range) and forward.strategy.is_direct


def _serves(earlier: ProgramSpec, spec: ProgramSpec) -> bool:
    """Return whether `spec` makes the same call as `earlier`, which records gradients if `spec` does."""
    return (earlier.grad or not spec.grad) and _is_same(earlier.call, spec.call)


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
