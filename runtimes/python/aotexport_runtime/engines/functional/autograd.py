"""The joint graph as an `autograd.Function`: forward, saved values, backward, and what backward checks.

Invariant: the same gradients are None as in eager autograd, rather than zeros.

Source: torch 2.13, `_functorch/_aot_autograd/runtime_wrappers.py`, `_AOTDispatchAutogradFunctionFactory`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotexport_runtime.engines.functional.joint import JointProgram, Pattern
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution import transforms
from aotexport_runtime.execution.autocast import draws_of_now
from aotexport_runtime.guards.caller import has_hooks
from aotexport_runtime.schema.program import IntermediateAlias


def run_joint(joint: JointProgram, inputs: Sequence[Any], symbols: dict[str, int]) -> Sequence[Any]:
    """Run the forward of a joint graph under autograd.

    Returns:
        Mutated values, outputs and intermediate bases, in order; aliases are opaque.
    """
    if joint.gradients.detached_inputs:
        inputs = list(inputs)
        for index in joint.gradients.detached_inputs:
            inputs[index] = inputs[index].detach()
    for index in joint.plain:
        if transforms.may_be_dead(inputs[index]):
            return _Joint.apply(joint, symbols, *inputs)
    return apply_joint(joint, symbols, *inputs)


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: JointProgram, symbols: dict[str, int], *inputs: Any) -> Sequence[Any]:
        needed: Pattern = ctx.needs_input_grad
        compiled = joint.found.get(needed) or joint.compiled(needed, symbols)
        # A lowered form draws other random numbers than the reference, which would differentiate another call.
        repeats = joint.reference is not None and not (compiled.saves_its_own and joint.draws)
        repeatable = RepeatableCall(joint, inputs, symbols) if repeats else None
        ctx.call = compiled, symbols, torch.are_deterministic_algorithms_enabled(), repeatable
        ctx.set_materialize_grads(False)
        results = compiled.forward([*inputs], symbols)
        # While it lives, nobody overwrites the saved tensors (`LeasedResults`).
        ctx.lease = getattr(results, "lease", None)
        if compiled.unchecked is None:
            ctx.save_for_backward(*results[compiled.checked])
        else:
            # The same memory under a version of its own.
            unchecked = [tensor.data for tensor in results[compiled.unchecked]]
            ctx.save_for_backward(*results[compiled.checked], *unchecked)
        if compiled.loose is not None:
            ctx.loose = results[compiled.loose]
        returned = results[: compiled.returns]
        return compiled.marked(ctx, returned) if compiled.has_marks else returned

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Sequence[Any]:
        compiled, symbols, deterministic, repeatable = ctx.call
        if compiled.joint.inner:
            refuse_unseen_gradients(ctx, grads)
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, repeatable, grads)
        if not deterministic and torch.are_deterministic_algorithms_enabled():
            raise NotSupported(
                "deterministic algorithms were switched on between forward and backward; switch them on before both"
            )
        if compiled.saves_its_own and any(grad is not None and transforms.batched(grad) for grad in grads):
            # Kernels take no batches of gradients.
            with torch.enable_grad():
                found = _differentiable_backward(ctx, repeatable, grads)
            return tuple([None if gradient is None else gradient.detach() for gradient in found])
        # A second pass raises where eager's first pass has freed saved tensors.
        args: list[Any] = [] if compiled.saves_nothing else _saved(ctx, grads)
        if compiled.checks:
            check_versions(ctx, grads)
        if compiled.loose is not None:
            args += ctx.loose
        batched, undefined = transforms.active(), 0
        for position, lay_out in compiled.tangents:
            tangent = grads[position]
            if tangent is None:
                undefined += 1
            else:
                # Batched gradients have no rules for operators that write over their operands.
                batched = batched or transforms.batched(tangent)
                tangent = lay_out(tangent, symbols)
            args.append(tangent)
        if undefined == len(compiled.tangents):
            return (None,) * len(ctx.needs_input_grad)
        function = compiled.backward(args, batched) if undefined or batched else compiled.whole_backward
        if undefined and compiled.needs_zeros:
            compiled.fill(args, symbols, ctx)
        if _clear is not None:
            _clear(ctx)
        try:
            found = (None, None, *function(args, symbols))
            if (compiled.checks or ctx.lease is not None) and _is_freed(ctx):
                ctx.lease, ctx.versions = None, ()
            return found
        except ZeroDivisionError:
            if repeatable is None:
                raise
            # Torch's own formulas give infinity where Python raises.
            with torch.enable_grad():
                found = repeatable.gradients(grads, ctx.needs_input_grad[2:])
            return (None, None, *[None if gradient is None else gradient.detach() for gradient in found])


def _saved(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return the saved tensors.

    Raises:
        RuntimeError: one was changed, or freed by an earlier pass after which eager raises too.
        NotSupported: a pass from other outputs freed them; in eager these may have saved tensors of their own.
    """
    try:
        saved = [*ctx.saved_tensors]
    except RuntimeError as error:
        passed = getattr(ctx, "passed", None)
        if passed is None or "second time" not in str(error) or any(grads[place] is not None for place in passed):
            raise
        raise NotSupported(
            "a backward pass from other outputs of this call has freed what the joint graph saved for all of them. "
            "Pass `retain_graph=True` to it, add the losses, or load the bundle with target='autograd'"
        ) from None
    if len(ctx.call[0].tangents) > 1:
        passed = {place for place, _ in ctx.call[0].tangents if grads[place] is not None}
        ctx.passed = passed | getattr(ctx, "passed", set())
    return saved


_clear: Callable[[Any], None] | None = getattr(torch.autograd.Function, "maybe_clear_saved_tensors", None)
"""Frees the saved tensors before backward computes, if the graph is not retained; None: this torch lacks it."""


def _is_freed(ctx: Any) -> bool:
    """Return whether the saved tensors were freed: the graph is not retained."""
    try:
        _ = ctx.saved_tensors
    except RuntimeError:
        return True
    return False


_super: Any = super(torch.autograd.Function, _Joint)
apply_joint: Callable[..., Sequence[Any]] = _super.apply
"""Runs a `JointProgram` under autograd, given its symbols and inputs: `_Joint.apply` without Python's checks for
function transforms. No transform may be active, and none may have left wrappers among `plain` inputs."""


def _differentiable_backward(
    ctx: Any, repeatable: RepeatableCall | None, grads: Sequence[torch.Tensor | None]
) -> tuple[Any, ...]:
    if repeatable is None:
        raise NotSupported(
            "double backward (`create_graph=True`) through this program's joint graph is not supported: it changes "
            "inputs that require grad, or has custom autograd functions. Load the bundle with target='autograd'"
        )
    _saved(ctx, grads)  # Raises where one was changed in place.
    if ctx.call[0].checks:
        check_versions(ctx, grads)
    return (None, None, *repeatable.gradients(grads, ctx.needs_input_grad[2:]))


class RepeatableCall:
    """A call that the forward graph can run again, for double backward."""

    def __init__(self, joint: JointProgram, inputs: Sequence[Any], symbols: dict[str, int]) -> None:
        """Record a call that is about to run: copies of inputs that it changes, versions of others."""
        if joint.mutated:
            inputs = list(inputs)
            for index in joint.mutated:
                inputs[index] = inputs[index].clone()
        try:
            self.versions = [inputs[index]._version for index in joint.steady]
        except RuntimeError:
            self.versions = list[int]()  # Inference tensors have none.
        self.joint, self.inputs, self.symbols = joint, inputs, symbols
        tensors = (value for value in inputs if isinstance(value, torch.Tensor))
        self.draws = draws_of_now(tensors) if joint.draws else contextlib.nullcontext

    def gradients(self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return differentiable gradients of the inputs.

        Raises:
            NotSupported: an input was changed since the call; eager would not read it again.
        """
        assert self.joint.reference is not None
        for index, version in zip(self.joint.steady, self.versions, strict=False):
            if self.inputs[index]._version != version:
                raise NotSupported(
                    f"double backward computes the call anew, and its `{self.joint.graph.inputs[index].name}` was "
                    "changed in place since. Load the bundle with target='autograd'"
                )
        with self.draws():
            # Hooks of the inputs run when this result reaches them, and must not run here as well.
            inputs = [
                value.view_as(value) if needs else value for value, needs in zip(self.inputs, needed, strict=True)
            ]
            arguments = list(inputs)
            for index in self.joint.mutated:
                arguments[index] = arguments[index].clone()
            outputs = self._as_returned(self.joint.reference(arguments, self.symbols))
        wanted = [value for value, needs in zip(inputs, needed, strict=True) if needs]
        reached = [i for i, g in enumerate(grads) if g is not None and outputs[i].requires_grad]
        of, given = [outputs[i] for i in reached], [grads[i] for i in reached]
        found = iter(torch.autograd.grad(of, wanted, given, create_graph=True, allow_unused=True))
        return [next(found) if needs else None for needs in needed]

    def _as_returned(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs in the order of the joint graph's forward: None per mutation, outputs, bases of views."""
        functional = self.joint.functional
        bases: list[Any] = [None] * functional.intermediate_bases
        for spec, output in zip(functional.outputs, outputs, strict=True):
            if isinstance(spec, IntermediateAlias) and output._base is not None:
                bases[spec.base_index] = output._base
        return [*[None] * len(functional.mutations), *outputs, *bases]


# --- checks of backward -------------------------------------------------------------------------------------
#
# A joint graph reads other tensors than eager. It is one node of autograd, so gradients of other outputs do not pass
# through an inner output, which they are computed from: its hooks and `retain_grad` would see a part of its gradient.


def refuse_unseen_gradients(node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse a backward in which a hook or `retain_grad` would see less than the whole gradient.

    Raises:
        NotSupported: names the output.
    """
    for inner, reference in getattr(node, "watched", ()):
        output = reference()
        if output is None or not has_hooks(output):
            continue
        if any(gradients[position] is not None for position in inner.outer):
            raise NotSupported(
                f"`{inner.name}` has a hook or retains its gradient, and another output is computed from it within the "
                "joint graph, where the gradient does not come by the hook. Load the bundle with target='autograd'"
            )


def node_of(returned: Sequence[Any]) -> Any:
    """Return the autograd node of a joint graph's forward, given its results; None: it made none."""
    nodes = (value.grad_fn for value in returned if isinstance(value, torch.Tensor))
    return next((node for node in nodes if node is not None), None)


def remember(node: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Let backward through a joint graph's `node` find tensors that eager reads, and hooks on inner outputs."""
    compiled, versions = node.call[0], list[tuple[torch.Tensor, int, Sequence[int]]]()
    for is_input, index, positions in compiled.checks:
        # An output would keep its own graph alive.
        tensor = inputs[index] if is_input else outputs[index].detach()
        if not tensor.is_inference():
            versions.append((tensor, tensor._version, positions))
    node.versions = versions
    node.watched = [(each, weakref.ref(outputs[each.output])) for each in compiled.joint.inner]


def check_versions(ctx: Any, grads: Sequence[torch.Tensor | None]) -> None:
    """Raise if a tensor that eager reads for one of `grads` was changed since the call."""
    for tensor, version, positions in getattr(ctx, "versions", ()):
        if tensor._version != version and any(grads[position] is not None for position in positions):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input or output of the program, of shape {list(tensor.shape)}, is at version {tensor._version}; "
                f"expected version {version} instead"
            )
