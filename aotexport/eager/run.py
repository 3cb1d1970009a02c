"""The model's own code, run for real: what it gives, with everything as it was afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from aotexport.eager.arguments import Arguments, example_arguments
from aotexport.errors import ExportFailed
from aotexport.model.arguments import check_changes, containers
from aotexport.model.attributes import attributes_restored
from aotexport.model.call import ExampleCall
from aotexport.model.mode import in_mode
from aotexport.model.programs import Mode
from aotexport.model.reach import reached_tensors
from aotexport.model.restore import restored
from aotexport.model.state import State
from aotexport.values.subclasses import CLASSES
from aotexport_runtime.call.given import given_tree, giving
from aotexport_runtime.commands.self_test import flat_outputs
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.values.observe import Inputs, Observation, make_inputs, observe
from aotexport_runtime.values.subclasses import TensorTypes, is_wrapper

SEED = 20240229
CALLS = 2

_KEPT_NBYTES = 64 << 20
"""How much of gradients is kept for the second call to add to."""

T = TypeVar("T")


def run_once(call: ExampleCall, state: State, mode: Mode) -> Any:
    """Call the model for real on the example inputs; its tensors, the inputs and the random state stay as they are.

    Returns:
        What the model returns; what is a tensor of its state is as it was before the call.
    """
    tensors = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in call.tensors
    ]
    args, kwargs = call.rebuild(tensors)
    # The trace that tells what a call uses may not be there yet.
    outside = reached_tensors((call.callable, call.module))
    with in_mode(call.module, mode, call.settled), restored(state, outside):
        return call.callable(*args, **kwargs)


def runs_without_gradients(call: ExampleCall, state: State) -> bool:
    """Return whether the model, in its current mode, runs under `torch.no_grad`: one that takes gradients may not."""
    mode: Mode = "function" if call.module is None else "train" if call.module.training else "eval"
    try:
        with torch.no_grad(), attributes_restored(call.module):
            run_once(call, state, mode)
    except RuntimeError:
        return False
    return True


def watch_example(
    call: ExampleCall, state: State, program: Program, look: Callable[[Callable[[], Any], list[Any]], T]
) -> T:
    """Return what `look` says of an eager call on the example inputs; everything stays as it was.

    Args:
        call: the example call.
        state: the module's state.
        program: which program.
        look: takes what calls the model, and its tensors and sizes, one per input of the program.
    """
    arguments = example_arguments(call, program)
    eager, make = _eager(call, program, arguments)
    tensors = {entry.names[0]: entry.tensor for entry in state.entries}
    with (
        attributes_restored(call.module),
        in_mode(call.module, program.mode, call.settled),
        restored(state),
        attention_as_traced(),
    ):
        values = make().values
        own = iter(values)
        inputs = [tensors[spec.name] if isinstance(spec, StateInput) else next(own) for spec in program.inputs]
        with torch.set_grad_enabled(program.grad):
            return look(lambda: eager(values), inputs)


def _eager(
    call: ExampleCall, program: Program, arguments: Arguments
) -> tuple[Callable[[list[Any]], Any], Callable[[], Inputs]]:
    """Return what calls the model on flat arguments, and what makes these anew."""
    device = next((leaf.device for leaf in call.tensors if isinstance(leaf, torch.Tensor)), None)
    own = {spec.path: index for index, spec in enumerate(arguments.specs)}
    form = Environment(tensor_types=TensorTypes(CLASSES)).form
    function = giving(program, call.callable)

    def eager(values: list[Any]) -> Any:
        tensors = [values[own[p]] if p in own else t for p, t in zip(call.paths, call.tensors, strict=True)]
        args, kwargs = call.rebuild(tensors)
        held = containers(call, args, kwargs)
        value = function(*args, **kwargs)
        check_changes(held, program.container_changes)
        return value

    return eager, lambda: make_inputs(arguments.specs, arguments.stored, device, form)


def dropped_gradients(state: State) -> tuple[str, ...]:
    """Return the names of the state tensors whose gradients recorded calls drop, as `Vector` has them: large ones.

    A graph's backward gives all of its gradients at once, so those that are kept are there twice in the second call.
    """
    sizes = {entry.names[0]: entry.tensor.nbytes for entry in state.entries if entry.tensor.requires_grad}
    ordered = sorted(sizes, key=lambda name: sizes[name])
    kept = accumulate(sizes[name] for name in ordered)
    return tuple(sorted(name for name, nbytes in zip(ordered, kept, strict=True) if nbytes > _KEPT_NBYTES))


def observe_eager(call: ExampleCall, state: State, program: Program, arguments: Arguments) -> Observation:
    """Return what a caller of the model sees, with a second call and a backward pass.

    Raises:
        ExportFailed: the model returns tensors of a class that a bundle cannot hold, or arrays where its trace has
            none, or the other way round.
    """
    eager, make = _eager(call, program, arguments)

    def current_state() -> dict[str, torch.Tensor]:
        return {e.names[0]: e.slots[0][0][e.slots[0][1]] if e.slots else e.tensor for e in state.entries}

    def outputs(value: Any) -> list[tuple[str, Any]]:
        try:
            found = flat_outputs(given_tree(program), value)
        except NotSupported as error:
            raise ExportFailed(
                f"{error}, where a trace of the call has an array. Return an array or a tensor"
            ) from error
        _check_classes(found, {type(tensor) for tensor in call.tensors})
        return found

    return observe(
        eager,
        make,
        [spec.path for spec in arguments.specs],
        current_state,
        outputs,
        seed=SEED,
        calls=CALLS,
        backward=program.grad,
        dropped=dropped_gradients(state),
    )


def _check_classes(outputs: list[tuple[str, Any]], given: set[type]) -> None:
    """Refuse outputs of a class of tensors that only the model's code makes: the runtime does not have it.

    Raises:
        ExportFailed: there is one.
    """
    known = {torch.Tensor, torch.nn.Parameter, *given}
    for name, value in outputs:
        if isinstance(value, np.ndarray):
            raise ExportFailed(f"`{name}` is an array, where a trace of the call has none. Return a tensor")
        if isinstance(value, torch.Tensor) and type(value) not in known and not is_wrapper(value):
            raise ExportFailed(
                f"{name} is a `{type(value).__qualname__}`, a class of tensors that a bundle cannot hold. Return a "
                "plain tensor (`as_subclass(torch.Tensor)`)"
            )


@contextlib.contextmanager
def attention_as_traced() -> Iterator[None]:
    """Switch off torch's inference fast path of attention modules, which tracing cannot take.

    It gives the same values in another memory layout; see docs/decisions/0003-attention-fast-path.md.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
