"""The example's values of the numbers that traced code branches on.

A trace has tensors without values. When Python code asks for one (`if x.sum() > 0:`, `range(n.item())`), the graph
traced so far runs on copies of the example's tensors. The code follows the resulting value, and a check in the graph
refuses calls whose values would lead another way. Nothing runs for code that asks for no value.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from aotexport.errors import ExportFailed
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import is_user_file, user_line
from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.checks import add_check, branches_follow, find_symbol, is_float_of_tensors, number_at
from aotexport.torch_internals.names import ShapeEnv
from aotexport.torch_internals.tracing import current_tracer
from aotexport_runtime.values.observe import cotangent

log = logging.getLogger("aotexport")
_SEED = 20240229
_CONDITION = "a condition"


@dataclass(frozen=True)
class Decision:
    """A question that code asked of values, with the example's answer.

    Attributes:
        fixed: the answer: "`value > 0` is True".
        is_number: whether it fixes a number, not a truth value about one.
        stack: where the code asked, as Python formats it.
    """

    fixed: str
    is_number: bool
    stack: str


class ExampleValues:
    """Values of data-dependent numbers in the example call, during its trace."""

    def __init__(self, inputs: Sequence[Any], earlier: ExampleValues | None = None) -> None:
        """Begin with no value known.

        Args:
            inputs: the example's tensors, one per graph input; they are copied when the first value is asked for.
            earlier: values of an earlier trace of the same code, for runs of it that no tracer sees.
        """
        self._inputs = inputs
        self._earlier = earlier
        self._repeated: Iterator[Any] = iter(())
        self._answers: list[Any] = []
        self._tracer: Any = None
        self._run: _ExampleRun | None = None
        self._known: dict[Any, Any] = {}
        self._sizes: Mapping[Any, Any] = {}
        self.decisions: list[Decision] = []
        """The questions and answers of the last trace."""

    @contextlib.contextmanager
    def followed(self, shape_env: ShapeEnv) -> Iterator[None]:
        """Let the trace in the block follow the example."""
        self._sizes = shape_env.backed_var_to_val
        try:
            formatted = patched(
                Patch(torch.Tensor, "__format__", _format, "Follow the example where its values become text")
            )
            with branches_follow(shape_env, self._get, self._decided), formatted:
                yield
        finally:
            self._close()

    def begin(self) -> None:
        """Note that the code to trace begins to run: the current trace tells values from now on."""
        self._close()
        self.decisions, self._answers = [], []
        self._repeated = iter(() if self._earlier is None else self._earlier._answers)
        self._tracer = current_tracer()

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None
        self._known = {}

    def _get(self, symbol: Any) -> Any:
        """Return a data-dependent symbol's value in the example call; None: the trace does not tell."""
        if symbol in self._known:
            return self._known[symbol]
        if self._tracer is None:
            self._known[symbol] = next(self._repeated, None)
            return self._known[symbol]
        found = find_symbol(self._tracer.graph, symbol)
        if found is None:
            return None
        if self._run is None:
            self._run = _ExampleRun(self._tracer, self._inputs)
        node, path = found
        try:
            with attempt("value in the example"):
                self._known[symbol] = number_at(self._run.value(node), path)
        except ExportFailed as refusal:
            log.info("the example's value of %s: %s", node, refusal)
            return None
        self._answers.append(self._known[symbol])
        return self._known[symbol]

    def _decided(self, expression: Any, value: Any) -> None:
        """Insert a check into the graph that `expression`, on which the code branches, is `value` again."""
        # A whole number comes of rounding, and other calls may well have it.
        if is_float_of_tensors(expression, value) and not float(value).is_integer():
            raise ExportFailed(
                f"{user_line()}the model turns the value of a tensor into a Python float ({float(value):.6g} in the "
                "example call), and the program would hold for calls with that very value alone. Keep it a tensor, or "
                "use what `Tensor.item()` returns in tensor operators alone"
            )
        numbers = {symbol: self._known[symbol] for symbol in expression.free_symbols if symbol in self._known}
        sizes = {symbol: self._sizes[symbol] for symbol in expression.free_symbols - numbers.keys()}
        message, stack = _message(expression, value, {**numbers, **sizes}), _user_stack()
        if self._tracer is not None:
            add_check(self._tracer.graph, expression, value, message, stack)
        answer = f"{_question(expression, {**numbers, **sizes})} is {_shown(value)}"
        self.decisions.append(Decision(answer, _is_number(expression, value), stack))
        if self._tracer is None and self._earlier is not None:
            place = len(self.decisions)
            if _places(self.decisions) != _places(self._earlier.decisions[:place]):
                raise ExportFailed(f"{user_line()}the code branches on other values than when it ran before")


def _places(decisions: Sequence[Decision]) -> list[tuple[str, str]]:
    """Return what was decided, with the innermost of the user's lines."""
    return [(each.fixed, each.stack.rpartition("  File ")[2]) for each in decisions]


def _format(tensor: torch.Tensor, spec: str) -> str:
    """Format an integer tensor as eager does: code names things by their numbers.

    A float is formatted without its value. Floats are for messages, and would fix the program to that very value.
    """
    if tensor.dim() == 0 and tensor.dtype == torch.bool:
        return format(bool(tensor.item()), spec)
    if tensor.dim() == 0 and not (tensor.is_floating_point() or tensor.is_complex()):
        return format(int(tensor.item()), spec)
    return object.__format__(tensor, spec)


def _question(expression: Any, numbers: dict[Any, Any]) -> str:
    """Return the question that the code asks, "`value > 0`", about these numbers."""
    names = {symbol: sympy.Symbol(f"value{index or ''}") for index, symbol in enumerate(numbers)}
    is_condition = expression in [sympy.Eq(symbol, 1) for symbol in numbers]
    return _CONDITION if is_condition else f"`{expression.xreplace(names)}`"


def _is_number(expression: Any, value: Any) -> bool:
    """Return whether only one number gives this answer."""
    is_equal = isinstance(expression, sympy.Eq) and any(arg.is_number for arg in expression.args)
    is_condition = is_equal and 1 in expression.args
    return not value.is_Boolean or (is_equal and not is_condition and value == sympy.true)


def _shown(value: Any) -> str:
    return f"{float(value):.6g}" if value.is_Float else str(value)


def _message(expression: Any, value: Any, numbers: dict[Any, Any]) -> str:
    """Return the error message for a call that takes another path."""
    question = _question(expression, numbers)
    seen = ", ".join(map(_shown, numbers.values()))
    needed = f"{question} to be {_shown(value)}"
    if question != _CONDITION:
        needed += f", with {seen} in the example call"
    return (
        "the values of this call lead another way through the code than those of the example call, along which the "
        f"program was captured; export with an example of this kind, or choose with torch.where or torch.cond. It "
        f"needs {needed}"
    )


class _ExampleRun:
    """The run of a graph during its trace, on copies of the example's tensors, in a thread of its own.

    The thread has none of the trace's modes, and its own grad mode and autocast regions.
    """

    def __init__(self, tracer: Any, inputs: Sequence[Any]) -> None:
        self._graph: torch.fx.Graph = tracer.graph
        self._root: Any = tracer.root
        self._inputs = iter(inputs)
        self._values: dict[torch.fx.Node, Any] = {}
        self._random_state = torch.Generator().manual_seed(_SEED).get_state()
        self._thread = ThreadPoolExecutor(max_workers=1)

    def close(self) -> None:
        self._thread.shutdown()

    def value(self, node: torch.fx.Node) -> Any:
        if node not in self._values:
            self._thread.submit(self._advance, node).result()
        return self._values[node]

    @torch.no_grad()
    def _advance(self, last: torch.fx.Node) -> None:
        before = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            for node in self._graph.nodes:
                if node not in self._values:
                    self._values[node] = self._evaluate(node)
                if node is last:
                    return
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(before)

    def _evaluate(self, node: torch.fx.Node) -> Any:
        if node.op == "placeholder":
            given = next(self._inputs, None)
            return _tangent(node) if given is None else _copy(given)
        if node.op == "get_attr":
            return _copy(getattr(self._root, str(node.target)))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _tangent(node: torch.fx.Node) -> torch.Tensor:
    """Return the gradient of an output with which the self-test of the example runs backward."""
    fake: torch.Tensor = node.meta["val"]
    sizes = [size if isinstance(size, int) else size.node.hint for size in fake.shape]
    if None in sizes:
        raise ExportFailed("it depends on gradients whose size depends on values")
    return cotangent(torch.empty(sizes, dtype=fake.dtype, device=fake.device))


def _copy(value: Any) -> Any:
    """Return a copy of a tensor with its layout, in memory of its own; other values are returned as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    span = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    overlaps = any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True))
    return value.detach().clone() if overlaps else span.copy_(value.detach())


def _user_stack() -> str:
    """Return the user's frames of the running stack, as Python formats them."""
    frames = traceback.extract_stack(sys._getframe(1))
    return "".join(traceback.StackSummary.from_list([f for f in frames if is_user_file(f.filename)]).format())
