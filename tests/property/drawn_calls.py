"""Calls drawn at random, of a model or of its loaded bundle: what requires grad, which losses, in which modes.

A session is a few calls of one module, in order, with changes between them. The draws of a call are those of its seed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from aotexport.torch_internals.calls import tree_map
from aotexport_runtime import AotExportError
from aotexport_runtime.values.observe import Observation
from aotexport_runtime.values.subclasses import is_wrapper, parts

PROPERTIES = ("freezing", "losses", "modes", "all")
"""What sessions draw: what requires grad; outputs of the losses; modes of the process and module; all of it."""


@dataclass(frozen=True)
class Draws:
    """What a call does; what depends on the model is drawn from `seed`."""

    training: bool
    grad_mode: str
    autocast: bool
    clears: bool
    joins_next: bool
    passes: int
    retains: bool
    freezes: bool
    drops: bool
    seed: int

    @classmethod
    def of(cls, kind: str, seed: str) -> Draws:
        """Draw a call of a session of this kind."""
        drawn = random.Random(seed)
        modes, losses, freezing = (kind in (name, "all") for name in ("modes", "losses", "freezing"))
        grad_modes = ("grad", "grad", "grad", "no_grad", "inference_mode") if modes else ("grad",)
        return cls(
            training=drawn.random() < (0.6 if modes else 0.9),
            grad_mode=drawn.choice(grad_modes),
            autocast=modes and drawn.random() < 0.3,
            clears=drawn.random() < 0.4,
            joins_next=modes and drawn.random() < 0.2,
            passes=2 if losses and drawn.random() < 0.25 else 1,
            retains=drawn.random() < 0.7,
            freezes=freezing,
            drops=losses,
            seed=drawn.randrange(1 << 30),
        )


@dataclass
class Session:
    """One side of a session: a module with its gradients, and losses that wait for the next call."""

    module: Any
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    roots: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def call(self, draws: Draws) -> Observation:
        """Make a drawn call; return what its caller can see.

        Raises:
            AotExportError: the bundle refuses it.
        """
        drawn, seen = random.Random(draws.seed), Observation()
        leaves = _Arguments(drawn, draws.freezes)
        args, kwargs = tree_map(leaves.vary, self.arguments())
        self._prepare(draws, drawn)
        torch.manual_seed(draws.seed)
        try:
            with _modes(draws):
                result = self.module(*args, **kwargs)
                seen.facts["grad mode after"] = str(torch.is_grad_enabled())
            seen.tensor("random number after", torch.rand(1))
            outputs = list(_flat("output", result))
            # Torch refuses to read some views whose base was written.
            self._look(seen, outputs, [*_flat("args", args), *_flat("kwargs", kwargs)])
        except AotExportError:
            raise
        except Exception as error:
            seen.facts["raises"] = str(error)
            return seen
        self._backward(seen, draws, drawn, [value for _, value in outputs if isinstance(value, Tensor)])
        for name, tensor in leaves.found.items():
            seen.tensor(f"call: gradient of {name}", tensor.grad)
        for name, tensor in self._tensors():
            seen.tensor(f"state {name}", tensor)
            seen.facts[f"state {name} requires_grad"] = str(tensor.requires_grad)
            if tensor.is_leaf:
                seen.tensor(f"call: gradient of {name}", tensor.grad)
        return seen

    def _prepare(self, draws: Draws, drawn: random.Random) -> None:
        """Set modes, freeze and thaw parameters, and drop gradients."""
        clears_to = drawn.random() < 0.7
        share = drawn.choice((0.0, 0.15, 0.5, 0.85, 1.0))
        if not isinstance(self.module, nn.Module):
            return
        self.module.train(draws.training)
        if draws.clears:
            self.module.zero_grad(set_to_none=clears_to)
        for _, parameter in sorted(self.module.named_parameters()):
            thawed = drawn.random() < share
            if draws.freezes and parameter.is_floating_point() and parameter.is_leaf:
                parameter.requires_grad_(thawed)

    def _look(self, seen: Observation, outputs: list[tuple[str, Any]], arguments: list[tuple[str, Any]]) -> None:
        known = [(name, value) for name, value in arguments if isinstance(value, Tensor)]
        for name, value in known:
            seen.tensor(f"{name} afterwards", value)
            seen.facts[f"{name} afterwards requires_grad"] = str(value.requires_grad)
        known += self._tensors()
        for name, value in outputs:
            if not isinstance(value, Tensor):
                seen.facts[name] = repr(value)
                continue
            seen.tensor(name, value)
            memory = _memory(value)
            seen.facts[f"{name} is"] = ", ".join(other for other, tensor in known if tensor is value)
            seen.facts[f"{name} shares"] = ", ".join(other for other, tensor in known if _memory(tensor) & memory)
            seen.facts[f"{name} autograd"] = (
                f"requires_grad={value.requires_grad} leaf={value.is_leaf} inference={value.is_inference()}"
            )
            known.append((name, value))

    def _backward(self, seen: Observation, draws: Draws, drawn: random.Random, outputs: list[Tensor]) -> None:
        """Run backward passes from drawn subsets of the outputs, or keep these for the next call's."""
        known = {id(o): o for o in outputs if o.requires_grad and o.grad_fn is not None and not o.is_inference()}
        for number in range(draws.passes):
            chosen = [output for output in known.values() if not draws.drops or drawn.random() < 0.5]
            self.roots += [(output, _cotangent(output, draws.seed)) for output in chosen]
            if draws.joins_next or not self.roots:
                continue
            roots, self.roots = self.roots, []
            try:
                torch.autograd.backward(*map(list, zip(*roots, strict=True)), retain_graph=draws.retains)
            except AotExportError:
                raise
            except Exception as error:
                seen.facts["backward raises"] = f"pass {number}: {error}"
                return

    def _tensors(self) -> list[tuple[str, Tensor]]:
        if not isinstance(self.module, nn.Module):
            return []
        return [*self.module.named_parameters(), *self.module.named_buffers()]


class _Arguments:
    """Draws whether floating arguments require grad, and whether they are leaves.

    Attributes:
        found: the leaves whose gradients are compared, by their number.
    """

    def __init__(self, drawn: random.Random, varies: bool) -> None:
        self._drawn, self._varies = drawn, varies
        self._known: dict[int, tuple[Any, Any]] = {}
        self._memory: set[int] = set()
        self.found: dict[str, Tensor] = {}

    def vary(self, value: Any) -> Any:
        """Return what stands for an argument."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._known:
            alone = not self._memory & _memory(value)
            self._memory |= _memory(value)
            self._known[id(value)] = value, self._varied(value, alone)
        return self._known[id(value)][1]

    def _varied(self, value: Tensor, alone: bool) -> Tensor:
        kind = self._drawn.choice(("plain", "leaf", "derived", "derived"))
        if self._varies and value.is_leaf and (value.is_floating_point() or value.is_complex()):
            value.requires_grad_(kind != "plain")
        if value.is_leaf and value.requires_grad:
            self.found[f"argument {len(self.found)}"] = value
            if self._varies and kind == "derived" and alone and type(value) is Tensor and value.numel() > 1:
                return value.clone()
        return value


@contextlib.contextmanager
def _modes(draws: Draws) -> Iterator[None]:
    grad_modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with grad_modes[draws.grad_mode](), torch.autocast("cpu", dtype=torch.bfloat16, enabled=draws.autocast):
        yield


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Return the leaves of a value with their paths, whatever its containers' classes."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _flat(f"{name}[{key!r}]", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flat(f"{name}[{index}]", item)
    elif hasattr(value, "__dict__") and not isinstance(value, type | FunctionType):
        for attribute in sorted(vars(value)):
            yield from _flat(f"{name}.{attribute}", vars(value)[attribute])
    else:
        yield name, value if isinstance(value, int | float | complex | str | None) else type(value).__name__


def _memory(tensor: Tensor) -> set[int]:
    if tensor.layout is not torch.strided:
        return set()
    return {part.untyped_storage().data_ptr() for part in parts(tensor)} - {0}


def _cotangent(output: Tensor, seed: int) -> Tensor:
    if is_wrapper(output) or output.layout is not torch.strided:
        return torch.ones_like(output)
    numbers = torch.arange(output.numel(), dtype=torch.float64) * 0.7 + seed % 97
    return torch.cos(numbers).reshape(output.shape).to(output.dtype)
