"""Attributes of modules that calls read and change (counters, caches), as the keyword argument `self` of the call.

Calls must have the attributes of the example; integers among them may be dynamic. If another state leads another way
through the code, a variant of the program serves it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from aotexport.eager.run import copies, eager_run
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall, example_call
from aotexport.model.programs import ProgramSpec
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import user_line
from aotexport.model.state import State
from aotexport.model.structure import flattened, tree_of
from aotexport.process.objects import is_a, namespace_of
from aotexport.state.tensors import Tensors, reached, reached_tensors
from aotexport.state.world import World, attributes_restored
from aotexport.values.same_tensors import are_same
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.guards.arguments import argument_rows
from aotexport_runtime.guards.rule import GuardTable
from aotexport_runtime.guards.signature import Signature
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.trees import Tree
from aotexport_runtime.submodules.python_state import ARGUMENT
from aotexport_runtime.values.subclasses import is_wrapper

MAX_CALLS = 8
"""Number of calls in a row whose resulting states are captured."""
_CALLS_BEFORE = 4
"""Number of calls after which another result of a call is looked for."""
_MISSING = object()

Observed = tuple[Tree, list[Any]]
"""Structure of the result of a call, and its tensors with those of the state that it changed."""


def with_attributes(spec: ProgramSpec, names: Iterable[str]) -> ProgramSpec:
    """Return a program with attributes of the module, given by path (`encoder.cache`), as an argument.

    The program may have others as an argument already. `ExportFailed`: one holds a value that a bundle cannot.
    """
    call, known = spec.call, attributes_of(spec.call)
    assert call.module is not None
    callable_ = namespace_of(call.callable).get("without_attributes", call.callable)
    found = {name: _value(call.module, name) for name in (*known, *names)}
    # A container that several modules hold is one argument, by its first name.
    first = {id(value): name for name, value in reversed(found.items()) if is_a(value, list, dict, deque)}
    shared = {name: first.get(id(value), name) for name, value in found.items()}
    values = {name: found[name] for name in dict.fromkeys(shared.values())}
    return dataclasses.replace(spec, call=_call(_taking(callable_, call.module, shared), call, values))


def attributes_of(call: ExampleCall) -> dict[str, Any]:
    """Return the attributes that are an argument of the call, by path, with the example's values."""
    return call.kwargs.get(ARGUMENT, {}) if "without_attributes" in namespace_of(call.callable) else {}


def _call(callable_: Callable[..., Any], like: ExampleCall, values: dict[str, Any]) -> ExampleCall:
    """Return a call with these attributes, integers among them dynamic, and the other dynamic sizes of `like`."""
    kwargs = {**like.kwargs, ARGUMENT: values}
    made = example_call(callable_, like.args, kwargs, {ARGUMENT: _dynamic(values)})
    made.first_call_constants = like.first_call_constants
    for path, sizes in zip(like.paths, like.axes, strict=True):
        if path in made.paths and not path.startswith(f"{ARGUMENT}["):
            made.axes[made.paths.index(path)] = sizes
    return made


def _dynamic(value: Any) -> Any:
    if type(value) is int:
        return Dim.AUTO
    if isinstance(value, dict):
        return {key: _dynamic(item) for key, item in value.items()}
    return [_dynamic(item) for item in value] if type(value) in (list, tuple) and len(value) else None


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    owner, attribute = _owner(module, name), name.rpartition(".")[2]
    return (owner._buffers if attribute in owner._buffers else vars(owner)), attribute


def _value(module: nn.Module, name: str) -> Any:
    table, attribute = _slot(module, name)
    if attribute in table:
        return table[attribute]
    # A counter may begin as an attribute of the class.
    return getattr(_owner(module, name), attribute, None)


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _taking(callable_: Callable[..., Any], module: nn.Module, names: Mapping[str, str]) -> Callable[..., Any]:
    """Return `callable_` with a keyword argument of attributes, which are set for the call and read after it."""
    slots = {name: _slot(module, name) for name in names}

    def call(*args: Any, **kwargs: Any) -> Any:
        values = kwargs.pop(ARGUMENT)
        before = {name: table.get(key, _MISSING) for name, (table, key) in slots.items()}
        try:
            for name, (table, key) in slots.items():
                table[key] = values[names[name]]
            result = callable_(*args, **kwargs)
            for name, (table, key) in slots.items():
                if names[name] == name:
                    values[name] = table.get(key)
                elif table.get(key) is not values[names[name]]:
                    raise ExportFailed(f"the call puts another object in `{name}`, and `{names[name]}` keeps it")
            return result
        finally:
            for name, (table, key) in slots.items():
                if before[name] is _MISSING:
                    table.pop(key, None)
                else:
                    table[key] = before[name]

    parameters = list(inspect.signature(getattr(callable_, "forward", callable_)).parameters.values())
    parameters.append(inspect.Parameter(ARGUMENT, inspect.Parameter.KEYWORD_ONLY))
    as_any: Any = call
    as_any.__self__, as_any.without_attributes = module, callable_
    as_any.__name__ = type(module).__name__ if isinstance(callable_, nn.Module) else callable_.__name__
    as_any.__module__ = type(module).__module__
    as_any.__signature__ = inspect.Signature(sorted(parameters, key=lambda each: each.kind))
    return as_any


# --- states that calls leave ------------------------------------------------------------------------------


def depends_on(spec: ProgramSpec, state: State, shorter: ExampleCall | None = None) -> bool:
    """Return whether a call gives another result, or fails, after other calls have changed attributes.

    Attributes that every call computes anew from the same sizes, such as tables, make no difference. `shorter` is a
    call that takes the same path in less time, which tells as well that nothing depends on them; None: the example
    alone tells. `ExportFailed`: the model fails on its example, so that this cannot be told.
    """
    if shorter is not None:
        with contextlib.suppress(ExportFailed):
            if not _depends(dataclasses.replace(spec, call=shorter), state):
                return False
    return _depends(spec, state)


def _depends(spec: ProgramSpec, state: State) -> bool:
    call = spec.call
    try:
        first, _ = _run(call, state, spec)
    except ExportFailed as refusal:
        error = refusal.error
        raise ExportFailed(
            "the call stores something in attributes of the model, and whether later calls read it cannot be told, "
            f"since the model fails on its example: {user_line(error)}{type(error).__name__}: {error}"
        ) from refusal.error
    for change in (with_other_inputs, lambda call: call):
        with attributes_restored(call.module):
            depends = _differs_after(change, first, spec, state)
        if depends is not None:
            return depends
    # Not even the example runs again.
    return True


def keeps_results_of_weights(spec: ProgramSpec, state: State) -> bool:
    """Return whether the first call stores what it computes of the weights, for all later calls."""
    first, _ = _run(spec.call, state, spec)
    with attributes_restored(spec.call.module):
        return bool(_differs_after(_with_other_weights, first, spec, state))


def _with_other_weights(call: ExampleCall) -> ExampleCall:
    def changed(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            for weight in changed.__self__.parameters():  # pyrefly: ignore[missing-attribute]
                weight.mul_(0.75)
        return call.callable(*args, **kwargs)

    changed.__self__ = call.module  # pyrefly: ignore[missing-attribute]
    return dataclasses.replace(call, callable=changed)


def _differs_after(
    change: Callable[[ExampleCall], ExampleCall], first: Observed, spec: ProgramSpec, state: State
) -> bool | None:
    """Return whether the result differs from the `first` after changed calls; None: the model does not take them."""
    call, (tree, values) = spec.call, first
    for number in range(_CALLS_BEFORE):
        try:
            _, after = _run_for_good(change(call), state, spec)
        except ExportFailed:
            # After the first call, a change of attributes made this one fail.
            return True if number else None
        try:
            call = _call(call.callable, call, after) if after else call
            changed_nothing = _watched(call, state)
            with attributes_restored(call.module):
                (other, later), left = _run_for_good(call, state, spec)
                # Further calls would find what this one did.
                is_settled = not left and changed_nothing()
        except ExportFailed:
            return True
        if tree != other or not all(map(are_same, values, later)):
            return True
        if is_settled:
            return False
    return False


def _watched(call: ExampleCall, state: State) -> Callable[[], bool]:
    """Return a function that tells whether attributes and tensors of the model, beside its state, are as now."""
    known = {id(entry.tensor) for entry in state.entries}
    tensors = Tensors(tensor for tensor in reached_tensors([call.module]) if id(tensor) not in known)
    attributes = World.of(call.module)
    return lambda: attributes.is_unchanged() and tensors.are_unchanged()


def with_other_inputs(call: ExampleCall) -> ExampleCall:
    """Return a call with the same attributes and other elements in its tensors: smaller, or in another order."""

    def other(leaf: Any, path: str) -> Any:
        if not isinstance(leaf, torch.Tensor) or is_wrapper(leaf) or path.startswith(f"{ARGUMENT}["):
            return leaf
        if leaf.is_complex() or (leaf.is_floating_point() and leaf.element_size() > 1):
            return (leaf.detach() * 0.75).requires_grad_(leaf.requires_grad)
        return leaf.flatten().roll(1).reshape(leaf.shape)

    return dataclasses.replace(call, tensors=[other(*pair) for pair in zip(call.tensors, call.paths, strict=True)])


def later_states(spec: ProgramSpec, state: State) -> Iterator[ProgramSpec]:
    """Yield the programs for the states that calls leave one after the other, until a state repeats."""
    call, seen = spec.call, [attributes_of(spec.call)]
    for _ in range(MAX_CALLS):
        _, after = _run(call, state, spec)
        try:
            call = _call(call.callable, call, after)
        except ExportFailed as error:
            raise ExportFailed(f"the call leaves in attributes of the model what later calls find: {error}") from error
        if any(_same_value(after, before) for before in seen):
            return
        seen.append(after)
        yield dataclasses.replace(spec, call=call)


def _run(call: ExampleCall, state: State, spec: ProgramSpec) -> tuple[Observed, dict[str, Any]]:
    """Call the model for real; return its result as structure and tensors with changed state, and its attributes."""
    with attributes_restored(call.module):
        return _run_for_good(call, state, spec)


def _run_for_good(call: ExampleCall, state: State, spec: ProgramSpec) -> tuple[Observed, dict[str, Any]]:
    """Do as `_run`, but leave in the module the values that the call stores in attributes outside of the argument."""
    running = eager_run(call, state, spec.mode, grad=spec.grad, seed=0, as_traced=True, keeps_attributes=True)
    with attempt("call for real"), running as run:
        tree, values = flattened(run(), "output", role="output")
        values = [*copies(values), *run.snapshot.changes()]
    return (tree, values), _detached(run.kwargs.get(ARGUMENT, {}))


def _detached(value: Any) -> Any:
    """Return a copy of a value whose tensors are detached clones; modules and their parameters stay."""
    within = reached([value])
    kept = {id(each): each for each in within if isinstance(each, nn.Parameter | nn.Module)}
    return copy.deepcopy(value, {id(t): t.detach().clone() for t in within if isinstance(t, torch.Tensor)} | kept)


def _same_value(one: Any, other: Any) -> bool:
    """Return whether two states are the same for a program: equal metadata of tensors, equal other values."""

    def described(value: Any) -> tuple[Tree, list[Any]]:
        tree, tensors = flattened(value, ARGUMENT, role="input")
        return tree, [(each.dtype, each.shape, each.stride(), each.requires_grad) for each in tensors]

    return described(one) == described(other)


def fits(program: Program, call: ExampleCall) -> bool:
    """Return whether a program serves a call."""
    environment = Environment()
    signature = Signature(program.parameters, lambda leaf: constant_value(leaf.value, environment))
    leaves: list[Any] = [None] * len(program.inputs)
    guards = GuardTable([argument_rows(program)], len(leaves))
    return not signature.flatten(call.args, call.kwargs, leaves) and not guards.check(leaves, {})


def initial_values(call: ExampleCall, state: State) -> tuple[State, dict[str, Tree]]:
    """Return attributes that are an argument as trees over the tensors of a state, and that state."""
    whole = State(list(state.entries), asked=state.asked)

    def index(value: Any, path: str) -> int | None:
        if type(value) is int:
            return None
        entry = whole.add_constant(value)
        return next(i for i, known in enumerate(whole.entries) if known is entry)

    trees = {name: tree_of(value, name, index, role="input") for name, value in attributes_of(call).items()}
    return whole, trees
