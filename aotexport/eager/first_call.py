"""Attributes that the first call sets for good: flags such as `self.prepared = True`.

A bundle has no Python state. It does the same as all calls but the first, if the first call gives the same results.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from aotexport.eager.run import copies, eager_run
from aotexport.model.attributes import AttributeChanged
from aotexport.model.call import ExampleCall
from aotexport.model.mode import Attribute
from aotexport.model.programs import Mode
from aotexport.model.state import State
from aotexport.model.structure import flattened
from aotexport.values.same_tensors import are_same


def add_first_call_constant(call: ExampleCall, state: State, mode: Mode, change: AttributeChanged) -> bool:
    """Add an attribute that a call changes to `call.first_call_constants`, if the change alters nothing else.

    The example is called with the attribute's old value and with its new one. Outputs and state must be equal, and both
    calls must leave the new value.

    Args:
        call: the example call.
        state: the module's state; left as it was.
        mode: mode to put the module in.
        change: the change that a trace saw.

    Returns:
        Whether the attribute was added.
    """
    path, _, name = change.name.rpartition(".")
    if call.module is None or any(change.name == _path(call.module, known) for known in call.first_call_constants):
        return False
    owner = call.module.get_submodule(path)
    first, value = _outcome(call, state, mode, (owner, name, change.old))
    later, same = _outcome(call, state, mode, (owner, name, change.new))
    if not (value == same == change.new and len(first) == len(later) and all(map(are_same, first, later))):
        return False
    call.first_call_constants.append((owner, name, change.new))
    return True


def note(call: ExampleCall) -> list[str]:
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


def _outcome(call: ExampleCall, state: State, mode: Mode, attribute: Attribute) -> tuple[list[Any], Any]:
    """Return outputs, inputs and changed state of a call for real with an attribute, and the attribute after it."""
    with eager_run(call, state, mode, seed=0, outside=True, attributes=[attribute]) as run:
        tree, values = flattened(run(), "output", role="output")
        return [tree, *copies(values), *copies(run.tensors), *run.snapshot.changes()], getattr(*attribute[:2])
