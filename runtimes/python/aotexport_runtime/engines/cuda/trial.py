"""A lowered program compared with its portable form, on the first call that it serves."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.allowed.operators import LAUNCH
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.functional.tangents import layout, positions_of_tangents
from aotexport_runtime.engines.lowered import Lowered
from aotexport_runtime.errors import NotSupported, first_line
from aotexport_runtime.execution.codegen import Environment
from aotexport_runtime.execution.functional_graph import compile_functional
from aotexport_runtime.rewrite.names import impure_nodes, random_nodes
from aotexport_runtime.rewrite.partition import Subgraph, forward_returns, partition_graph
from aotexport_runtime.schema.program import FunctionalGraph, Program
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Observation

log = logging.getLogger("aotexport_runtime")

LIMITS = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Accepted error, relative to the largest magnitude: libraries round to fewer bits inside (TF32), and sums of other
orders differ; a kernel that is wrong is wrong by more."""

SEED = 0
"""Seed of the incoming gradients of the compared backward."""


class Trial:
    """Compares a lowered program with its portable form, before the program's results are used."""

    def __init__(self, bundle: Bundle, program: Program, environment: Environment, lowered: Lowered) -> None:
        self._bundle = bundle
        self._program = program
        self._environment = environment
        self._lowered = lowered
        self._agrees: bool | None = None
        self._lock = threading.Lock()

    def __call__(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> bool:
        """Return whether they agree; the first call compares them, and leaves its inputs as they are."""
        if self._agrees is None:
            with self._lock:
                if self._agrees is None:
                    self._agrees = self._compare(inputs, dict(symbols))
        return self._agrees

    def _compare(self, inputs: Sequence[Any], symbols: dict[str, int]) -> bool:
        name, functional = self._program.name, self._program.functional
        assert functional is not None
        graph = self._bundle.graph(name, functional.file)
        if random_nodes(graph):
            log.info("program %s draws random numbers, and its kernels are not compared", name)
            return True
        if any(node.op == LAUNCH for node in graph.nodes):
            log.info("program %s launches kernels of the model's own, and nothing else can be compared with them", name)
            return True
        inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
        portable = portable_form(self._bundle, self._program, self._environment)
        try:
            with torch.no_grad():
                got = _observed(self._lowered, inputs, symbols, functional)
                expected = _observed(portable, inputs, symbols, functional)
        except torch.cuda.OutOfMemoryError:
            log.warning("program %s was not compared: there is not the memory for it", name)
            return True
        except (NotSupported, RuntimeError) as error:
            # If the call itself is wrong, the portable form says so in eager's words.
            log.warning("program %s runs without its kernels: %s", name, first_line(error))
            return False
        limits = {name: LIMITS.get(value.dtype, 0.0) for name, value in expected.values.items()}
        for each in compare(expected, got):
            if not (each.agrees or each.error <= limits.get(each.name, 0.0)):
                other = each.expected or each.got
                facts = f"expected {each.expected}, got {each.got}" if other else f"{each.error:.1e} off"
                log.warning("program %s runs without its kernels, which disagree: %s, %s", name, each.name, facts)
                return False
        return True


def portable_form(bundle: Bundle, program: Program, environment: Environment) -> Lowered:
    """Return a program's functional graph as operator calls of torch, in the calling convention of lowered programs."""
    functional = program.functional
    assert functional is not None
    graph, gradients = bundle.graph(program.name, functional.file), functional.gradients
    compiled = functools.partial(compile_functional, graph, environment=environment, label=f"{program.name} (compared)")
    if gradients is None:
        subgraph = Subgraph([value.name for value in graph.inputs], list(graph.nodes), graph.outputs)
        return Lowered(target="portable", forward=compiled(subgraph, detached=True), backward=None, saved=0)
    wanted = [True] * len(gradients.of_inputs)
    partitioned = partition_graph(graph, functional, gradients.partitions[0], wanted, impure_nodes(graph))
    return Lowered(
        target="portable",
        forward=compiled(partitioned.forward, visible=forward_returns(functional), detached=True),
        backward=compiled(partitioned.backward),
        saved=partitioned.saved_tensors + partitioned.saved_unchecked + partitioned.saved_others,
    )


def _observed(
    lowered: Lowered, inputs: Sequence[Any], symbols: dict[str, int], functional: FunctionalGraph
) -> Observation:
    """Return the results of forward, and the gradients of backward for incoming gradients drawn from a seed."""
    returns, gradients = forward_returns(functional), functional.gradients
    results = lowered.forward(list(inputs), symbols)
    values: dict[str, Any] = {f"result {index}": value for index, value in enumerate(results[:returns])}
    if lowered.backward is not None and gradients is not None:
        tangents: list[torch.Tensor] = []
        for tangent, position in zip(gradients.tangents, positions_of_tangents(functional), strict=True):
            like = results[position]
            generator = torch.Generator(like.device).manual_seed(SEED)
            drawn = torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_(generator=generator)
            tangents.append(layout(tangent)(drawn, symbols))
        found = lowered.backward([*results[returns:], *tangents], symbols)
        values |= {f"gradient of input {index}": value for index, value in enumerate(found)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    facts = {name: repr(value) for name, value in values.items() if name not in tensors}
    facts |= {name: f"{value.dtype} of shape {tuple(value.shape)}" for name, value in tensors.items()}
    # Errors of complex numbers are measured as those of pairs.
    real = {n: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for n, t in tensors.items()}
    return Observation(facts, real)
