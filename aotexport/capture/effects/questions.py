"""Questions of a model's code, or of torch on its behalf, whether values require grad; and the inputs that decide.

A program is fixed to the answers, unless its code does the same for each; see `Program.questions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from aotexport.capture.effects.grad_mode import history_of, recorded_in_regions
from aotexport.model.source_lines import is_user_file
from aotexport.process.objects import is_a
from aotexport.torch_internals.tracing import REQUIRES_GRAD, node_of, traces_subgraph

QUESTIONS = frozenset(("grad_fn", "is_leaf", "needs_input_grad", "requires_grad"))
"""Names of attributes that ask whether a value requires grad."""


@dataclass(frozen=True)
class Question:
    """Whether one of some values requires grad.

    Attributes:
        sources: positions of the placeholders of the trace of which one must require grad for that; None: not known.
        requires_grad: the answer at capture.
        recording: whether only calls that record gradients depend on it.
    """

    sources: frozenset[int] | None
    requires_grad: bool
    recording: bool


@dataclass
class Questions:
    """The questions of one trace, without repetition; `grad` and `reads` are those of `Effects`."""

    grad: bool = True
    reads: set[Any] = field(default_factory=set[Any])
    asked: dict[Question, None] = field(default_factory=dict[Question, None])

    def answer(self, tensor: torch.Tensor) -> bool:
        """Return whether autograd records a tensor in eager."""
        computed = _computed(tensor)
        return tensor.requires_grad and (computed is None or self.grad or recorded_in_regions(computed))

    def as_in_eager(self, value: Any) -> Any:
        """Return a value; a tensor that autograd records in the trace alone is detached."""
        detached = isinstance(value, torch.Tensor) and value.requires_grad and not self.answer(value)
        return value.detach() if detached else value

    def ask(self, tensor: torch.Tensor) -> bool:
        """Record that the code reads whether autograd records a tensor; return whether it does in eager."""
        answer = self.answer(tensor)
        if tensor.requires_grad and _computed(tensor) is not None:
            self.reads.add("grad_mode")
        if answer or not tensor.requires_grad:
            self._record([tensor], recording=False)
        return answer

    def ask_for_gradients(self, tensors: Sequence[Any]) -> bool:
        """Record that gradients depend on whether one of some values requires grad; return whether one does."""
        self._record([each for each in tensors if isinstance(each, torch.Tensor)], recording=True)
        return any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)

    def _record(self, tensors: Sequence[torch.Tensor], *, recording: bool) -> None:
        answer = any(tensor.requires_grad for tensor in tensors)
        nodes = [node for node in map(node_of, tensors) if node is not None]
        sources = None if traces_subgraph() else _sources(nodes, answer)
        if sources is None or sources:
            self.asked[Question(sources, answer, recording)] = None


def _computed(tensor: torch.Tensor) -> torch.fx.Node | None:
    node = node_of(tensor)
    return None if node is None or node.op == "placeholder" else node


def _sources(nodes: Sequence[torch.fx.Node], requires_grad: bool) -> frozenset[int] | None:
    """Return the positions of the placeholders that decide whether one of some values requires grad; None: not known.

    If none does in the trace, placeholders that cannot change that may be among those returned.
    """
    pending, seen = [*nodes], set[torch.fx.Node]()
    while pending:
        each = pending.pop()
        if each in seen or (requires_grad and not each.meta.get(REQUIRES_GRAD, True)):
            continue
        if requires_grad and each.target is torch.ops.aten.requires_grad_.default and each.args[1:] != (False,):
            return frozenset()
        seen.add(each)
        if each.op == "call_function" and each.target is not torch.ops.aten.detach.default:
            pending += history_of(each)
    placeholders = nodes[0].graph.find_nodes(op="placeholder") if nodes else ()
    found = frozenset(place for place, node in enumerate(placeholders) if node in seen)
    # Below autograd the trace does not show which values have a history.
    return None if requires_grad and nodes and not found else found


current_questions: ContextVar[Questions] = ContextVar("current_questions")
"""The questions of the trace that is going on."""


def own_code(target: nn.Module | Callable[..., Any], module: nn.Module | None) -> Iterator[CodeType]:
    """Yield the code objects of the functions of a callable and its module, found by following the names in each."""
    children = () if module is None else module.modules()
    pending = [(target.__func__ if is_a(target, MethodType) else target, type(module))]
    pending += [(getattr(type(child), "forward", None), type(child)) for child in children]
    seen: set[Any] = set()
    while pending:
        function, owner = pending.pop()
        if not is_a(function, FunctionType) or (function, owner) in seen:
            continue
        seen.add((function, owner))
        if not is_user_file(function.__code__.co_filename):
            continue
        for code in _codes(function.__code__):
            yield code
            called = [vars(base)[name] for name in code.co_names for base in owner.__mro__ if name in vars(base)]
            called += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
            pending += [(callee, owner) for callee in called]


def codes_of_function(function: Any) -> Iterator[CodeType]:
    """Yield the code objects of a custom autograd function."""
    for name in ("forward", "setup_context", "backward", "vjp"):
        yield from own_code(inspect.unwrap(getattr(function, name)), None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
