"""Functions and modules lowered, without their kernels being compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from aotexport.capture.forward import capture_forward
from aotexport.capture.functional.capture import Refused, capture_functional_graph
from aotexport.capture.trace.python_operators import operators_kept
from aotexport.encode.program import encode_program, with_functional
from aotexport.lower.build import with_results_apart
from aotexport.lower.cuda.lowering import CudaProgram, lower_program
from aotexport.model.programs import Example, choose_programs
from aotexport.model.state import collect_state
from aotexport.state.mode import in_mode
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.limits import DEFAULT
from aotexport_runtime.validate.graph import check_graph

NAMESPACE = "aotexport_cases"


def lowered(
    target: nn.Module | Callable[..., Any], *args: Any, program: str = "infer", dynamic_shapes: Any = None
) -> CudaProgram:
    """Return `target`, called with `args`, as it is lowered, its graphs checked as at load."""
    spec = choose_programs(target, Example(args, {}, dynamic_shapes), program)[0]
    state = collect_state(spec.call.module)
    with in_mode(spec.call.module, spec.mode), operators_kept([NAMESPACE]):
        forward = capture_forward(spec.call, state)
        encoded = encode_program(spec, forward, root=None, strip=True)
        functional = capture_functional_graph(forward, grad=spec.grad)
    assert not isinstance(functional, Refused)
    encoded = with_functional(encoded, forward, functional, root=None, strip=True)
    program = dataclasses.replace(encoded, lowered=lower_program(encoded.record, forward, functional))
    found = with_results_apart(program).lowered
    symbols = {dimension.symbol for dimension in encoded.record.dimensions}
    for file, graph in found.graphs.items():
        check_graph(graph, symbols, {"kernel", NAMESPACE}, where=Place(file), limits=DEFAULT, has_signatures=False)
    return found


def operators(program: CudaProgram, file: str = "forward.json") -> list[str]:
    """Return the operators that a lowered graph calls, in order."""
    return [node.op for node in program.graphs[file].nodes]


def launches(program: CudaProgram, file: str = "forward.json") -> list[Any]:
    """Return the launches of a lowered graph, in order."""
    return [node for node in program.graphs[file].nodes if node.op.startswith("kernel::")]
