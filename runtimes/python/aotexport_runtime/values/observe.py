"""Observes the effects of a call, eager or of a bundle: values, gradients, metadata, identity, aliasing, mutation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from aotexport_runtime.errors import CheckFailed
from aotexport_runtime.schema.graph import Subclass
from aotexport_runtime.schema.vectors import VectorInput, spans
from aotexport_runtime.values.compare import NORM, NORMS, SAMPLE, Observed, kept
from aotexport_runtime.values.subclasses import Form, inner_tensors, is_wrapper, parts, with_inner

_PART = 1 << 16
"""Elements that are widened at a time: a wide copy of a large tensor would not fit, and large freed blocks between
small kept ones stay unused."""


class Observation(Observed):
    """What is observed of tensors of torch."""

    def tensor(self, name: str, tensor: torch.Tensor | None) -> None:
        """Record the value and metadata of a tensor, or that there is none."""
        if tensor is None:
            self.facts[name] = "None"
            return
        if tensor.layout is not torch.strided:
            self.tensor(name, tensor.detach().to_dense())
            self.facts[f"{name} layout"] = str(tensor.layout).removeprefix("torch.")
            return
        steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        self.facts[name] = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {steps}"
        if is_wrapper(tensor):
            self.facts[name] += f" of {type(tensor).__name__}"
            for attribute, inner in inner_tensors(tensor.detach()).items():
                self.tensor(f"{name}.{attribute}", inner)
            return
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).cpu()
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        self.values |= sampled(name, flat, self.sample)


def sampled(name: str, flat: torch.Tensor, sample: int | None) -> dict[str, torch.Tensor]:
    """Return a value, whose elements are `flat`, as it is kept: whole, or its norms and some of them."""
    elements = kept(flat, sample).contiguous().clone()
    if len(elements) == flat.numel():
        return {name: elements}
    if sample is None:
        return {f"{name}{NORM}": _norms(flat)[:1], name: elements}
    return {f"{name}{NORMS}": _norms(flat), name: elements}


def _norms(flat: torch.Tensor) -> torch.Tensor:
    parts = flat.split(_PART)
    # One block for all parts: small results between freed large blocks keep an allocator from reusing these.
    wide = torch.empty(len(parts[0]), dtype=torch.float64, device=flat.device)
    norms, greatest = (torch.empty(len(parts), dtype=torch.float64, device=flat.device) for _ in range(2))
    for index, part in enumerate(parts):
        elements = wide[: len(part)].copy_(part)
        norms[index] = torch.linalg.vector_norm(elements)
        greatest[index] = elements.abs_().nan_to_num_(nan=0.0, posinf=0.0).max()
    return torch.stack([torch.linalg.vector_norm(norms), greatest.max()])


def make_inputs(
    specs: Sequence[VectorInput], stored: Mapping[str, torch.Tensor], device: Any, form: Callable[[Subclass], Form]
) -> Inputs:
    """Return fresh arguments for a recorded call from stored spans of storage, by key.

    `device`: None is the CPU. `form` returns the structure of a tensor subclass with its class.
    """
    keys = dict.fromkeys(span.key for spec in specs for span in spans(spec))
    memory = {key: stored[key].to(device).clone() for key in keys}
    roots = _views_made_differentiable(specs, memory)
    values: list[Any] = []
    leaves: list[Any] = []
    for spec in specs:
        if spec.value is not None:
            values.append(spec.value)
            leaves.append(None)
        elif spec.requires_grad and not spec.is_leaf and spec.key in roots:
            with torch.enable_grad():
                values.append(memory[spec.key].as_strided(spec.shape, spec.stride, spec.offset))
            leaves.append(roots[spec.key])
        else:
            leaf = _tensor(spec, memory, form).requires_grad_(spec.requires_grad)
            with torch.enable_grad():
                values.append(leaf if spec.is_leaf or not spec.requires_grad else leaf.clone())
            leaves.append(leaf if spec.requires_grad else None)
    return Inputs(values, leaves)


def _tensor(spec: VectorInput, memory: Mapping[str, torch.Tensor], form: Callable[[Subclass], Form]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for part in spans(spec):
        base = memory[part.key]
        tensor = torch.empty(0, dtype=base.dtype, device=base.device)
        found.append(tensor.set_(base.untyped_storage(), part.offset, part.shape, part.stride))
    return found[0] if spec.subclass is None else form(spec.subclass).make(iter(found), {})


def _views_made_differentiable(
    specs: Sequence[VectorInput], memory: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Make spans non-leaves if a non-leaf views them beside others, or in part; return their leaves, by key."""
    roots: dict[str, torch.Tensor] = {}
    for spec in specs:
        if not spec.key or not spec.requires_grad or spec.is_leaf or spec.key in roots:
            continue
        alone = sum(other.key == spec.key for other in specs) == 1
        if alone and math.prod(spec.shape) == memory[spec.key].numel():
            continue
        roots[spec.key] = memory[spec.key].requires_grad_(True)
        with torch.enable_grad():
            memory[spec.key] = roots[spec.key].clone()
    return roots


class Inputs(NamedTuple):
    """Arguments of a call; `leaves` has the tensor that the gradient of each accumulates in, None: it has none."""

    values: list[Any]
    leaves: list[Any]


def observe(
    call: Callable[[list[Any]], Any],
    make: Callable[[], Inputs],
    paths: Sequence[str],
    state: Callable[[], Mapping[str, torch.Tensor]],
    flatten: Callable[[Any], list[tuple[str, Any]]],
    *,
    seed: int,
    calls: int,
    backward: bool,
    loss: bool = False,
    dropped: Collection[str] = (),
    sample: int | None = SAMPLE,
    sparing: bool = False,
) -> Observation:
    """Call several times and return the observed effects; the random state stays as it is.

    Args:
        call: takes the flat arguments.
        make: makes the arguments of one call, which the call may change.
        paths: name per argument.
        state: returns the current state tensors by name.
        flatten: returns the leaves of a result, with their paths.
        seed: for `torch.manual_seed`.
        calls: how often to call.
        backward: run a backward pass from all differentiable outputs after each call.
        loss: run it only from the first of them that is a scalar.
        dropped: names of state tensors whose gradients are dropped after each call.
        sample: see `Observed`.
        sparing: look at each gradient that is dropped when the backward pass, which gives whole ones, has it.
    """
    seen = Observation(sample=sample)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        before = {name: _snapshot(tensor) for name, tensor in state().items()}
        for number in range(calls):
            inputs = make()
            with torch.set_grad_enabled(backward):
                result = call(inputs.values)
            outputs = flatten(result)
            where = f"call {number}: "
            early = [_drop_when_seen(seen, where, name, state()[name]) for name in dropped if sparing and backward]
            _look_at_outputs(seen, where, outputs, inputs.values, paths, state())
            if backward:
                _backward(seen, where, outputs, loss)
            for hook in early:
                hook.remove()
            _look_at_inputs(seen, where, inputs, paths, backward)
            for name, tensor in state().items():
                if tensor.requires_grad and tensor.is_leaf and backward:
                    gradient = f"{where}gradient of {name}"
                    if not (early and gradient in seen.facts):
                        seen.tensor(gradient, tensor.grad)
                    if name in dropped:
                        tensor.grad = None
                # Kernels write running statistics without a new version, so buffers are always observed.
                if not tensor.requires_grad or before[name][0] != _snapshot(tensor)[0]:
                    seen.tensor(f"{where}state {name}", tensor)
    return seen


def _look_at_inputs(seen: Observation, where: str, inputs: Inputs, paths: Sequence[str], backward: bool) -> None:
    for path, value, leaf in zip(paths, inputs.values, inputs.leaves, strict=True):
        if isinstance(value, torch.Tensor):
            seen.tensor(f"{where}{path} afterwards", value)
            seen.facts[f"{where}{path} afterwards requires_grad"] = str(value.requires_grad)
        if leaf is not None and backward:
            seen.tensor(f"{where}gradient of {path}", leaf.grad)


def _drop_when_seen(seen: Observation, where: str, name: str, tensor: torch.Tensor) -> Any:
    """Look at the gradient of a tensor when the backward pass has it, and drop it; return the hook."""

    def see(tensor: torch.Tensor) -> None:
        seen.tensor(f"{where}gradient of {name}", tensor.grad)
        tensor.grad = None

    return tensor.register_post_accumulate_grad_hook(see)


def _snapshot(tensor: torch.Tensor) -> tuple[tuple[Any, ...], object]:
    """Return what differs of another tensor, of a new version and of other memory, which its version does not show."""
    if is_wrapper(tensor):
        return (id(tensor), tensor._version), tensor
    # The tensor and its memory are kept: what takes their place would lie at the same address.
    return (id(tensor), tensor._version, tensor.data_ptr()), (tensor, tensor.untyped_storage())


def _look_at_outputs(
    seen: Observation,
    where: str,
    outputs: list[tuple[str, Any]],
    inputs: Sequence[Any],
    paths: Sequence[str],
    state: Mapping[str, torch.Tensor],
) -> None:
    seen.facts[f"{where}outputs"] = ", ".join(path for path, _ in outputs)
    known: list[tuple[str, torch.Tensor]] = [
        (path, value) for path, value in zip(paths, inputs, strict=True) if isinstance(value, torch.Tensor)
    ]
    known += list(state.items())
    for path, value in outputs:
        name = f"{where}{path}"
        if not isinstance(value, torch.Tensor):
            seen.facts[name] = repr(value)
            continue
        seen.tensor(name, value)
        seen.facts[f"{name} requires_grad"] = str(value.requires_grad)
        same = [other for other, tensor in known if tensor is value]
        shared = [other for other, tensor in known if _share(tensor, value)]
        if same:
            seen.facts[f"{name} is"] = same[0]
        if shared:
            seen.facts[f"{name} shares memory with"] = ", ".join(shared)
        known.append((path, value))


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device:
        return False
    pointers = {part.untyped_storage().data_ptr() for part in parts(a)} - {0}
    return any(part.untyped_storage().data_ptr() in pointers for part in parts(b))


def _backward(seen: Observation, where: str, outputs: list[tuple[str, Any]], loss: bool) -> None:
    """Run a backward pass with fixed cotangents from every differentiable output, or from the loss."""
    roots: list[torch.Tensor] = []
    for _, value in outputs:
        differentiable = isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None
        if differentiable and not any(value is root for root in roots):
            roots.append(value)
    if loss:
        roots = [root for root in roots if not root.dim()][:1]
    if not roots:
        return
    try:
        torch.autograd.backward(roots, [cotangent(root) for root in roots])
    except CheckFailed:
        # The call takes another path than the program, as one that fails in forward.
        raise
    except RuntimeError as error:
        seen.facts[f"{where}backward"] = f"raises {type(error).__name__}"


def cotangent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fixed, generic cotangent: cosines of the element numbers, in the tensor's class if possible."""
    if is_wrapper(tensor) and all(part.is_floating_point() for part in parts(tensor)):
        return with_inner(tensor.detach(), lambda value: torch.empty_like(value).copy_(cotangent(value)))
    numbers = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
    return torch.cos(numbers * 0.7 + 0.3).reshape(tensor.shape).to(tensor.dtype)
