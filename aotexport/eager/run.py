"""Run the model's own code for real and return its results; everything is put back afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from aotexport.eager.recorded_arguments import RecordedArguments, example_arguments
from aotexport.errors import ExportFailed
from aotexport.model.call import Attribute, ExampleCall
from aotexport.model.programs import Mode, ProgramSpec
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import described, is_user_file
from aotexport.model.state import State
from aotexport.process.patches import Patch, caller, patched
from aotexport.state.arguments import argument_tables, check_changes
from aotexport.state.mode import in_mode
from aotexport.state.tensors import StateSnapshot, reached_tensors, restored
from aotexport.state.world import World
from aotexport.torch_internals.calls import is_dimension
from aotexport.values.subclasses import CLASSES
from aotexport_runtime.call.flat_call import flat_outputs, returning_whole_result, whole_result_tree
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.values.observe import Inputs, Observation, make_inputs, observe
from aotexport_runtime.values.subclasses import TensorTypes, is_wrapper

SEED = 20240229

_KEPT_GRADIENTS_NBYTES = 64 << 20
"""Size of gradients to keep for the second call to add to."""

T = TypeVar("T")


@dataclass
class Run:
    """The call of a model in a block of `eager_run`, on copies of the example's tensors.

    Attributes:
        snapshot: the state as the block found it.
        world: the module's attributes as the block found them, in its mode; empty: they are kept.
        tensors: tensors and sizes passed to the call, one per path of the example call.
        kwargs: its keyword arguments, as it left them.
    """

    call: ExampleCall
    state: State
    snapshot: StateSnapshot
    world: World
    tensors: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    _has_begun: bool = False

    def begin(self) -> None:
        """Put the model back as the block found it, for further calls that know nothing of those before."""
        if self._has_begun:
            self.snapshot.put_back()
            self.world.put_back()
            self.snapshot.drop_gradients()
        self._has_begun = True

    def __call__(self, call: ExampleCall | None = None) -> Any:
        """Call the model, as in the example or in another call of its callable; return the result."""
        call = call or self.call
        self.tensors = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in call.tensors
        ]
        args, self.kwargs = call.rebuild(self.tensors)
        return call.callable(*args, **self.kwargs)


@contextlib.contextmanager
def eager_run(
    call: ExampleCall,
    state: State,
    mode: Mode,
    *,
    grad: bool | None = None,
    seed: int | None = None,
    as_traced: bool = False,
    outside: bool = False,
    keeps_attributes: bool = False,
    attributes: Sequence[Attribute] = (),
) -> Iterator[Run]:
    """Let the model run for real in the block, then restore state, attributes, mode and random numbers.

    Args:
        call: the example call.
        state: the module's state.
        mode: mode to put the module in.
        grad: whether gradients are recorded; None: as they are outside.
        seed: of torch's random generator; None: it is not seeded.
        as_traced: without the fast path that tracing cannot take, see `attention_as_traced`.
        outside: restore other tensors that the model reaches too, since no trace has told yet which it changes.
        keeps_attributes: let the module keep the values that calls store in its attributes.
        attributes: attributes to set, beside those of the call.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_mode(call.module, mode, [*call.first_call_constants, *attributes]))
        world = World.of(None if keeps_attributes else call.module)
        stack.callback(world.put_back)
        if grad is not None:
            stack.enter_context(torch.set_grad_enabled(grad))
        reached = reached_tensors((call.callable, call.module)) if outside else ()
        snapshot = stack.enter_context(restored(state, reached))
        if as_traced:
            stack.enter_context(attention_as_traced())
        if seed is not None:
            torch.manual_seed(seed)
        stack.enter_context(patched(_asked_in_vain(call.module, state.asked)))
        yield Run(call, state, snapshot, world)


def _asked_in_vain(module: nn.Module | None, asked: set[str]) -> Patch:
    """Return a patch that adds the names of attributes that a module lacks, and its code asks for, to `asked`."""
    get_attribute = nn.Module.__getattr__

    def get(owner: nn.Module, name: str) -> Any:
        try:
            return get_attribute(owner, name)
        except AttributeError:
            if owner is module and is_user_file(caller().f_code.co_filename):
                asked.add(name)
            raise

    return Patch(nn.Module, "__getattr__", get, "Record attributes that code asks for in vain")


def copies(values: Iterable[Any]) -> list[Any]:
    """Return values with detached copies of the tensors among them."""
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]


def runs_without_gradients(call: ExampleCall, state: State, mode: Mode) -> bool:
    """Return whether the model, in a mode, runs under `torch.no_grad`: one that takes gradients may not."""
    try:
        with attempt("example call"), eager_run(call, state, mode, grad=False, outside=True) as run:
            run()
    except ExportFailed:
        return False
    return True


def refuse_failing_example(spec: ProgramSpec, state: State) -> None:
    """Refuse a call on which the model itself fails (`ExportFailed`), with its error and the user's line."""
    try:
        with attempt("example call"), eager_run(spec.call, state, spec.mode, grad=spec.grad, outside=True) as run:
            run()
    except ExportFailed as refusal:
        error = refusal.error
        mode = f" in {spec.mode} mode" if spec.call.module is not None else ""
        hint = ""
        if spec.grad and runs_without_gradients(spec.call, state, "eval"):
            hint = ". It runs without gradients in eval mode: export that alone (`--program infer`)"
        elif spec.call.module is None and _makes_a_module(error):
            hint = (
                f". `{spec.call.name}` seems to make the model, and has required arguments: give it these "
                "(`functools.partial`), or export what it returns"
            )
        told = described(error).removesuffix(".") if hint else described(error)
        raise ExportFailed(f"the model fails on the example inputs{mode}: {told}{hint}") from error


def _makes_a_module(error: Exception) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(f.f_code.co_name == "__init__" and isinstance(f.f_locals.get("self"), nn.Module) for f in frames)


def watch_call(run: Run, program: Program, call: ExampleCall, look: Callable[[Callable[[], Any], list[Any]], T]) -> T:
    """Return the result of `look` at an eager call.

    `look` takes a function that calls the model, and its tensors and sizes, one per input of the program.
    """
    arguments = example_arguments(call, program)
    eager = _eager(call, program, arguments)
    tensors = {entry.names[0]: entry.tensor for entry in run.state.entries}
    run.begin()
    values = made_inputs(call, arguments).values
    own = iter(values)
    inputs = [tensors[spec.name] if isinstance(spec, StateInput) else next(own) for spec in program.inputs]
    with torch.set_grad_enabled(program.grad):
        return look(lambda: eager(values), inputs)


def _eager(call: ExampleCall, program: Program, arguments: RecordedArguments) -> Callable[[list[Any]], Any]:
    """Return a function that calls the model on flat arguments."""
    own = {spec.path: index for index, spec in enumerate(arguments.specs)}
    function = returning_whole_result(program, call.callable)

    def eager(values: list[Any]) -> Any:
        tensors = [values[own[p]] if p in own else t for p, t in zip(call.paths, call.tensors, strict=True)]
        args, kwargs = call.rebuild(tensors)
        before = argument_tables(call, args, kwargs)
        value = function(*args, **kwargs)
        check_changes(before, program.container_changes)
        return value

    return eager


def made_inputs(call: ExampleCall, arguments: RecordedArguments) -> Inputs:
    """Return fresh arguments of a recorded call, on the device of the example call."""
    device = next((leaf.device for leaf in call.tensors if isinstance(leaf, torch.Tensor)), None)
    form = Environment(tensor_types=TensorTypes(CLASSES)).form
    return make_inputs(arguments.specs, arguments.stored, device, form)


def dropped_gradients(state: State) -> tuple[str, ...]:
    """Return the names of state tensors whose large gradients recorded calls drop, as `Vector` has them.

    A graph's backward returns all of its gradients at once, so recorded gradients exist twice in the second call.
    """
    sizes = {entry.names[0]: entry.tensor.nbytes for entry in state.entries if entry.tensor.requires_grad}
    ordered = sorted(sizes, key=lambda name: sizes[name])
    totals = accumulate(sizes[name] for name in ordered)
    return tuple(sorted(name for name, nbytes in zip(ordered, totals, strict=True) if nbytes > _KEPT_GRADIENTS_NBYTES))


def observe_eager(
    call: ExampleCall, state: State, program: Program, arguments: RecordedArguments, calls: int
) -> Observation:
    """Return everything that a caller of the model sees in consecutive calls.

    Each has a backward pass, if the program has gradients. `ExportFailed`: the model returns tensors of a class that a
    bundle cannot hold, or arrays where its trace has none, or the other way round.
    """

    def current_state() -> dict[str, torch.Tensor]:
        return {e.names[0]: e.slots[0][0][e.slots[0][1]] if e.slots else e.tensor for e in state.entries}

    def outputs(value: Any) -> list[tuple[str, Any]]:
        try:
            found = flat_outputs(whole_result_tree(program), value)
        except NotSupported as error:
            raise ExportFailed(
                f"{error}, where a trace of the call has an array. Return an array or a tensor"
            ) from error
        _check_classes(found, {type(tensor) for tensor in call.tensors})
        return found

    return observe(
        _eager(call, program, arguments),
        lambda: made_inputs(call, arguments),
        [spec.path for spec in arguments.specs],
        current_state,
        outputs,
        seed=SEED,
        calls=calls,
        backward=program.grad,
        dropped=dropped_gradients(state),
    )


def _check_classes(outputs: list[tuple[str, Any]], argument_types: set[type]) -> None:
    """Refuse outputs of a class of tensors that only the model's code makes: the runtime does not have it."""
    known = {torch.Tensor, torch.nn.Parameter, *argument_types}
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

    It gives the same values in another memory layout; see docs/decisions/0001-forward-graph-is-the-meaning.md.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# --- shorter calls, for questions whose answer is the same at every size -----------------------------------------


_SHORT = 4
"""Size of the shorter axes: kernels take little time, and small windows fit."""


def shorter_call(call: ExampleCall) -> ExampleCall | None:
    """Return the call with the first elements along each dynamic axis.

    Its sizes may be related, as `2 * batch` is to `batch`; the returned call may not run then. None: no axis is longer,
    or a copy of an argument is unlike it: arguments share memory, or are results of other operations in a graph of
    autograd.
    """
    own = [leaf for leaf in call.tensors if isinstance(leaf, torch.Tensor) and not is_wrapper(leaf)]
    memory = {leaf.untyped_storage().data_ptr() for leaf in own if leaf.layout is torch.strided and leaf.numel()}
    if len(memory) < len(own) or not all(leaf.is_leaf for leaf in own):
        return None
    tensors = [_shorter(leaf, axes or {}) for leaf, axes in zip(call.tensors, call.axes, strict=True)]
    if all(map(operator.is_, tensors, call.tensors)):
        return None
    args, kwargs = call.rebuild(tensors)
    return dataclasses.replace(call, args=args, kwargs=kwargs, tensors=tensors)


def _shorter(leaf: Any, axes: dict[int, Any]) -> Any:
    if not isinstance(leaf, torch.Tensor) or is_wrapper(leaf):
        return leaf
    cut = leaf.detach()
    for axis, dimension in axes.items():
        if is_dimension(dimension):
            cut = cut.narrow(axis, 0, min(_SHORT, leaf.shape[axis]))
    if cut.shape == leaf.shape:
        return leaf
    # A clone keeps the order of the axes in memory, without the gaps.
    return cut.clone().requires_grad_(leaf.requires_grad)
