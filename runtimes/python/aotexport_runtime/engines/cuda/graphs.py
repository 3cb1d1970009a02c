"""Forward and backward of a lowered program as CUDA graphs: when they are captured, and when a replay is safe.

A graph reads and writes at fixed addresses: state where it is, other inputs and results as copies. Saved tensors stay
in its memory, under a lease that lives as long as autograd may read them: a forward that finds one alive runs without
the graph. A replay raises their versions, so that autograd refuses a backward that a lease did not protect.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Container, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotexport_runtime.engines.lowered import Lease, LeasedResults, Lowered
from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.execution.codegen import Function

log = logging.getLogger("aotexport_runtime")

WARM_UPS = 2
"""Calls that run without a graph first: code is loaded, kernels are tuned, libraries take their workspaces."""

MAX_GRAPHS = 8
"""Most sets of shapes that forward, or backward, has graphs for."""

_MAX_COUNTED = 64
"""Most sets of shapes whose calls are counted."""

_one_at_a_time = threading.Lock()
"""One capture of a process may be under way."""


class Capture:
    """Captures the work that is put on a CUDA stream of one device; the only part that needs a GPU.

    Graphs of one pool may use one another's dead memory, and so never run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._ended: torch.cuda.Event | None = None
        self._ended_on: torch.cuda.Stream | None = None

    def possible(self) -> bool:
        """Return whether nobody else captures on the current stream."""
        return not torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def ordered(self) -> Generator[None, None, None]:
        """Make the current stream wait for the work that the last context put on its stream."""
        stream = torch.cuda.current_stream(self._device)
        if self._ended is not None and self._ended_on != stream:
            stream.wait_event(self._ended)
        yield
        if self._ended is None:
            self._ended = torch.cuda.Event()
        self._ended.record(stream)
        self._ended_on = stream

    def capture(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Return a function that replays `run`, and the results of `run`.

        Raises:
            RuntimeError: it cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        # Where a capture fails, torch leaves its stream the current one.
        with _one_at_a_time, torch.cuda.device(self._device), torch.cuda.stream(current):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = run()
        self._pool = graph.pool()
        return graph.replay, outputs


class GraphedProgram:
    """A lowered program that replays graphs where that is safe, and else runs without."""

    def __init__(self, lowered: Lowered, returned: int, state: Container[int], capture: Capture) -> None:
        """Prepare a program.

        `returned`: how many results of its forward are the caller's; the others are saved tensors. `state`: inputs that
        are parameters and buffers, which keep their addresses.
        """
        self._lowered = lowered
        self._returned = returned
        self._state = state
        self._capture = capture
        self._forward = _CapturedPass(lowered.forward, capture)
        self._backward = None if lowered.backward is None else _CapturedPass(lowered.backward, capture)
        self._lock = threading.Lock()

    def forward(self, args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
        """Run the forward; see `Lowered.forward`."""
        if self._capture.possible():
            with self._lock:
                fixed = [index in self._state for index in range(len(args))]
                graph = self._forward.graph(args, symbols, fixed)
                if graph is not None and not graph.is_leased():
                    with self._capture.ordered():
                        graph.replay(args)
                        returned = [_copy(value) for value in graph.outputs[: self._returned]]
                    saved = graph.saved(args, self._returned)
                    args.clear()
                    return LeasedResults((*returned, *saved), graph.leased())
        return self._lowered.forward(args, symbols)

    def backward(self, args: list[Any], symbols: dict[str, int]) -> tuple[Any, ...]:
        """Run the backward; see `Lowered.backward`."""
        assert self._backward is not None
        assert self._lowered.backward is not None
        if not self._capture.possible():
            return self._lowered.backward(args, symbols)
        with self._lock:
            source = self._forward.owner_of(args, self._lowered.saved)
            if source is not None:
                fixed = source.fixed_saved(self._returned)
                graph = self._backward.graph(args, symbols, [index in fixed for index in range(len(args))])
                with self._capture.ordered():
                    if graph is None:
                        return self._lowered.backward(args, symbols)
                    graph.replay(args)
                    gradients = tuple([_copy(value) for value in graph.outputs])
                args.clear()
                return gradients
        return self._lowered.backward(args, symbols)


@dataclass
class _Counted:
    """Calls of one set of shapes: their addresses, how many there were, and the graph once there is one."""

    addresses: tuple[int, ...]
    calls: int = 0
    graph: _Graph | None = None
    failed: bool = False


class _CapturedPass:
    """The graphs of a forward, or of a backward, by the shapes of its arguments."""

    def __init__(self, run: Function, capture: Capture) -> None:
        self._run = run
        self._capture = capture
        self._counted: dict[Hashable, _Counted] = {}

    def graph(self, args: Sequence[Any], symbols: dict[str, int], fixed: Sequence[bool]) -> _Graph | None:
        """Return the graph for these arguments, captured if it is time to; None: there is none."""
        key = _shapes(args, fixed), tuple(symbols.items()), _settings()
        addresses = tuple([arg.data_ptr() for arg, is_fixed in zip(args, fixed, strict=True) if is_fixed])
        counted = self._counted.get(key)
        if counted is None and len(self._counted) >= _MAX_COUNTED:
            return None
        if counted is None or counted.addresses != addresses:
            # The graph would read replaced state at its old address.
            counted = self._counted[key] = _Counted(addresses)
        counted.calls += 1
        is_due = counted.graph is None and not counted.failed and counted.calls > WARM_UPS
        if is_due and sum(other.graph is not None for other in self._counted.values()) < MAX_GRAPHS:
            try:
                counted.graph = _Graph(self._run, args, symbols, fixed, self._capture)
            except (RuntimeError, NotSupported) as error:
                counted.failed = True
                log.warning("no CUDA graph, calls run without: %s", first_line(error))
        return counted.graph

    def owner_of(self, args: Sequence[Any], saved: int) -> _Graph | None:
        """Return the graph whose replay saved these tensors, the first `saved` of `args`; None: there is none."""
        addresses = [arg.data_ptr() for arg in args[:saved]]
        graphs = (counted.graph for counted in self._counted.values())
        return next((graph for graph in graphs if graph is not None and graph.saved_at(addresses)), None)


class _Graph:
    """A captured call."""

    def __init__(
        self, run: Function, args: Sequence[Any], symbols: dict[str, int], fixed: Sequence[bool], capture: Capture
    ) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = [arg if is_fixed else _room_for(arg) for arg, is_fixed in zip(args, fixed, strict=True)]
            self._copied = [index for index, is_fixed in enumerate(fixed) if not is_fixed and _is_tensor(args[index])]
            self._fill(args)
            self._replay, self.outputs = capture.capture(lambda: run(list(self.inputs), dict(symbols)))
        inputs = {_place(self.inputs[index]): index for index in self._copied}
        self._from_input = [inputs.get(_place(value)) if _is_tensor(value) else None for value in self.outputs]
        state = [arg.untyped_storage().data_ptr() for arg, is_fixed in zip(args, fixed, strict=True) if is_fixed]
        self._own = [
            value
            for value, source in zip(self.outputs, self._from_input, strict=True)
            if _is_tensor(value) and source is None and value.untyped_storage().data_ptr() not in state
        ]
        self._lease: weakref.ref[Lease] | None = None

    def replay(self, args: Sequence[Any]) -> None:
        """Run the graph on the values of `args`."""
        self._fill(args)
        self._replay()

    def _fill(self, args: Sequence[Any]) -> None:
        for index in self._copied:
            _without_repetition(self.inputs[index]).copy_(_without_repetition(args[index]))

    # --- saved tensors, the outputs after the returned ones ----------------------------------------------

    def saved(self, args: Sequence[Any], returned: int) -> list[Any]:
        """Return the saved tensors of the replay for `args`: inputs of that call, and tensors in the graph's memory."""
        torch.autograd.graph.increment_version(self._own)
        saved = zip(self.outputs[returned:], self._from_input[returned:], strict=True)
        return [value if source is None else args[source] for value, source in saved]

    def fixed_saved(self, returned: int) -> set[int]:
        """Return which saved tensors have the same address after every replay, as positions among them."""
        return {at for at, source in enumerate(self._from_input[returned:]) if source is None}

    def saved_at(self, addresses: Sequence[int]) -> bool:
        """Return whether these are the addresses of the saved tensors, but for inputs of the call."""
        start = len(self.outputs) - len(addresses)
        rest = zip(self.outputs[start:], self._from_input[start:], addresses, strict=True)
        return all(source is not None or value.data_ptr() == address for value, source, address in rest)

    def leased(self) -> Lease:
        """Return a new lease; while it lives, no replay overwrites the saved tensors."""
        lease = Lease()
        self._lease = weakref.ref(lease)
        return lease

    def is_leased(self) -> bool:
        """Return whether something may still read the saved tensors."""
        return self._lease is not None and self._lease() is not None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _room_for(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _without_repetition(value: torch.Tensor) -> torch.Tensor:
    """Return `value` with one element along axes that repeat it in memory."""
    for axis, (size, step) in enumerate(zip(value.size(), value.stride(), strict=True)):
        if step == 0 and size > 1:
            value = value.narrow(axis, 0, 1)
    return value


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.size(), value.stride(), value.dtype


def _shapes(args: Sequence[Any], fixed: Sequence[bool]) -> tuple[Any, ...]:
    """Return the shapes, strides and dtypes that a graph fixes of its arguments; None for state, known by address."""
    return tuple(
        [
            None if is_fixed else (arg.shape, arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else arg
            for arg, is_fixed in zip(args, fixed, strict=True)
        ]
    )


def _settings() -> tuple[Any, ...]:
    """Return the switches of torch that a graph's operators were chosen by."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if hasattr(torch.backends, "fp32_precision"):  # Since torch 2.9; then the older names may raise.
        switches: list[Any] = [torch.backends, cuda.matmul, cudnn.conv, cudnn.rnn]  # pyrefly: ignore[missing-attribute]
        precision = tuple([switch.fp32_precision for switch in switches])
    else:
        precision = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    return torch.are_deterministic_algorithms_enabled(), cudnn.enabled, cudnn.benchmark, *precision
