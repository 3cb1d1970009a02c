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


def add_first_call_constants(call: ExampleCall, state: State, mode: Mode, change: AttributeChanged) -> bool:
    """Add attributes that a call changes to `call.first_call_constants`, if the changes alter nothing else.

    The example is called with the attributes' old values and with the new ones. Outputs and state must be equal, and
    both calls must leave the new values. If these are not, the first attribute is tried alone.

    Args:
        call: the example call.
        state: the module's state; left as it was.
        mode: mode to put the module in.
        change: the changes that a trace saw.

    Returns:
        Whether one was added.
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


def _outcome(
    call: ExampleCall, state: State, mode: Mode, attributes: list[Attribute]
) -> tuple[list[Any], list[Attribute]]:
    """Return outputs, inputs and changed state of a call for real with attributes, and the attributes after it."""
    with eager_run(call, state, mode, seed=0, outside=True, attributes=attributes) as run:
        tree, values = flattened(run(), "output", role="output")
        left = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
        return [tree, *copies(values), *copies(run.tensors), *run.snapshot.changes()], left
