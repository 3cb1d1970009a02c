"""The forward graph of each program, over one state that calls of all of them may change."""

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
        """Begin with a state.

        Args:
            state: the module's state; constants that traces find are added.
            captured: whether programs over it have been captured before.
        """
        self._state = state
        self._captured = captured

    def capture(self, spec: ProgramSpec) -> ForwardCapture:
        """Return the forward graph of a program.

        Raises:
            ExportFailed: it cannot be captured; says why.
            PythonStateChanged: the call cannot be followed through the values that it stores in attributes.
            StateReshaped: the call changes the shape of state, and earlier programs do not know.
        """
        forward = self._trace(spec)
        self._note_reshaped(forward)
        self._captured = True
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
