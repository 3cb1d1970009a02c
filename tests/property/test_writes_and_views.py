"""Random programs of writes, views and grad-mode regions, called in ways unlike the captured one: eager's results."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import aotexport
from aotexport_runtime import CallInvalid, load
from aotexport_runtime.commands.self_test import run_vectors
from tests.property.profile import exported

NEW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda a, b: a.sin(),
    "product": lambda a, b: a * b.sum(),
    "average": lambda a, b: a.mean(-1, keepdim=True),
    "pair": lambda a, b: torch.stack([a, a * 2]),
    "dropout": lambda a, b: nn.functional.dropout(a, 0.4),
    "choice": lambda a, b: torch.where(a > 0, a, a * 0.5),
    "greatest": lambda a, b: a.max(),
    "places": lambda a, b: a.argmax(),
}
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned": lambda a, b: a.transpose(0, -1),
    "rest": lambda a, b: a[1:],
    "flat": lambda a, b: a.reshape(-1),
    "deeper": lambda a, b: a.unsqueeze(0),
    "detached": lambda a, b: a.detach(),
    "part": lambda a, b: a.split(2)[0],
    "many": lambda a, b: a.expand(2, *a.shape),
    "column": lambda a, b: a.select(-1, 0),
    "same": lambda a, b: a.contiguous(),
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scale": lambda a, b: a.mul_(1.5),
    "add": lambda a, b: a.add_(b.sum()),
    "clear": lambda a, b: a.zero_(),
    "copy": lambda a, b: a.copy_(b.mean()),
    "first row": lambda a, b: a[0].fill_(0.25),
    "clamp": lambda a, b: a.clamp_(-0.5, 0.5),
    "hidden": lambda a, b: a.detach().mul_(0.5),
    "turn": lambda a, b: a.transpose_(0, -1),
}
STATEMENTS = {**NEW, **VIEWS, **WRITES}
PLACES = st.integers(0, 9)


@dataclass(frozen=True)
class Statement:
    """One line: what is done, to which of the values so far, with which other, and whether gradients are recorded."""

    name: str
    first: int
    second: int
    under_no_grad: bool

    def run(self, values: list[Tensor]) -> None:
        """Run the line; it appends its result, unless it writes."""
        a, b = values[-1 - self.first % len(values)], values[self.second % len(values)]
        # A view that is made under no_grad is a leaf without a way to its base, which no one writes on purpose.
        hidden = self.under_no_grad and self.name not in VIEWS
        if hidden or (self.name in WRITES and isinstance(a, nn.Parameter)):
            with torch.no_grad():
                result = STATEMENTS[self.name](a, b)
        else:
            result = STATEMENTS[self.name](a, b)
        if self.name not in WRITES:
            values.append(result)


class Program(nn.Module):
    """A random program over two arguments, a parameter and a buffer."""

    def __init__(self, lines: list[Statement], returned: list[int]) -> None:
        super().__init__()
        self.lines, self.returned = lines, returned
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).cos())
        self.register_buffer("total", torch.linspace(0, 2, 12).reshape(3, 4).sin())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Run the lines and return some of the values."""
        values = [self.total, self.weight, y, x]
        for line in self.lines:
            line.run(values)
        return tuple(values[-1 - place % len(values)] for place in self.returned)


@dataclass(frozen=True)
class Arguments:
    """What a call passes: tensors of their own, or views of one; which require grad; and the caller's grad mode."""

    views_of_one: bool
    differentiable: tuple[bool, bool]
    grad_mode: bool = True

    def make(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the arguments, no leaves where they require grad, and the leaves."""
        values = torch.linspace(-2, 2, 24).reshape(6, 4).sin()
        if self.views_of_one:
            leaf = values.requires_grad_(self.differentiable[0])
            whole = leaf * 1 if leaf.requires_grad else leaf
            return [whole[:3], whole[2:5]], [leaf]
        leaves = [
            part.clone().requires_grad_(grad) for part, grad in zip(values.split(3), self.differentiable, strict=True)
        ]
        return [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves], leaves


statements = st.builds(Statement, st.sampled_from([*STATEMENTS]), PLACES, PLACES, st.sampled_from([False, False, True]))
modules = st.builds(Program, st.lists(statements, min_size=2, max_size=7), st.lists(PLACES, min_size=1, max_size=3))
grads = st.tuples(st.booleans(), st.booleans())
captures = st.builds(Arguments, st.booleans(), grads)
calls = st.lists(st.builds(Arguments, st.booleans(), grads, st.booleans()), min_size=3, max_size=3)


def seen(module: nn.Module, call: Arguments) -> list[Any]:
    """Return what a caller can see of a call: values, gradients, metadata, identity, shared memory and mutation."""
    torch.manual_seed(0)
    arguments, leaves = call.make()
    with torch.set_grad_enabled(call.grad_mode):
        outputs = module(*arguments)
    known = [*arguments, *module.parameters(), *module.buffers(), *outputs]
    facts: list[Any] = [torch.rand(1)]
    for output in outputs:
        facts += [output.detach().clone(), output.requires_grad, output.is_leaf]
        facts += [output.stride() if output.numel() > 1 else (), [other is output for other in known]]
        facts.append([_memory(other) == _memory(output) for other in known])
    facts += [tensor.detach().clone() for tensor in (*arguments, *module.parameters(), *module.buffers())]
    facts += [(tensor.shape, tensor.requires_grad) for tensor in arguments]
    _backward(output for output in outputs if output.requires_grad and output.grad_fn is not None)
    return facts + [tensor.grad if tensor.is_leaf else -1 for tensor in (*leaves, *module.parameters())]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _backward(outputs: Iterable[Tensor]) -> None:
    roots = list({id(output): output for output in outputs}.values())
    if roots:
        torch.autograd.backward(roots, [torch.cos(root.detach() * 3) for root in roots])


@exported
@given(modules, captures, calls)
def test_call_unlike_the_capture_gives_what_eager_gives(tmp_path_factory, module, capture, calls):
    path = tmp_path_factory.mktemp("programs") / "bundle"
    try:
        seen(copy.deepcopy(module), capture)
    except (RuntimeError, IndexError):
        assume(False)
    aotexport.export(module, tuple(capture.make()[0]), output=path, programs=["train"], verify=False)
    # As at a verified export: what disagrees with the recorded calls is refused, or not used.
    assume(all(result.agrees for result in run_vectors(path, target="autograd")))
    target = "portable" if all(result.agrees for result in run_vectors(path, target="portable")) else "autograd"
    for call in (capture, *calls):
        try:
            expected = seen(copy.deepcopy(module), call)
        except (RuntimeError, IndexError):
            continue
        try:
            got = seen(load(path, target=target).train(), call)
        except CallInvalid:
            continue
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
