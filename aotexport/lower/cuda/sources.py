"""Sources of kernels, as modules without the compiler that wrote them; a name ends in a digest of the rest."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aotexport.lower.cuda.retarget import CannotLower
from aotexport.lower.cuda.wrapper import runtime_arguments
from aotexport.torch_internals.inductor import CachingAutotuner, GridExpr
from aotexport.torch_internals.names import OpOverload
from aotexport_runtime.schema.sizes import Size, SizeExpression

_DROPPED_MODULES = ("torch._inductor.runtime.hints",)
_NAME_LENGTH = 80


@dataclass(frozen=True)
class Candidate:
    """One configuration of a kernel: fixed parameters, options of the compiler, and blocks per axis."""

    constants: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[Size, Size, Size]


@dataclass(frozen=True)
class KernelSource:
    """A kernel before it is compiled.

    Attributes:
        name: its name, and that of the function in the Python module `text`.
        signature: per parameter of the function its type in Triton's words.
        divisible: parameters that are multiples of 16.
        arguments: parameters that compiled code takes, in order.
        grid_arguments: further arguments of a launch.
        candidates: configurations, the default first.
        operators: names of the operators that were fused in it.
        stack_traces: where the user's code called them.
    """

    name: str
    text: str
    signature: dict[str, str]
    divisible: tuple[str, ...]
    arguments: tuple[str, ...]
    grid_arguments: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    operators: tuple[str, ...] = ()
    stack_traces: tuple[str, ...] = ()


def joined(kernels: Iterable[KernelSource]) -> dict[str, KernelSource]:
    """Return kernels by name, equal ones joined: with the operators fused in each of them."""
    found: dict[str, KernelSource] = {}
    for kernel in kernels:
        known = found.setdefault(kernel.name, kernel)
        found[kernel.name] = dataclasses.replace(
            known,
            operators=tuple(sorted({*known.operators, *kernel.operators})),
            stack_traces=tuple(dict.fromkeys((*known.stack_traces, *kernel.stack_traces))),
        )
    return found


def kernel_source(tuner: CachingAutotuner, origins: Iterable[torch.fx.Node] = ()) -> KernelSource:
    """Return a kernel by the compiler's description for its autotuner, and by the nodes that were fused in it.

    `CannotLower`: it needs a feature that a bundle cannot hold; names it.
    """
    function = tuner.fn
    meta = tuner.triton_meta
    extra = tuple(tuner.inductor_meta.get("extra_launcher_args", ()))
    arguments = tuple(name for name in runtime_arguments(tuner) if name not in extra)
    signature = dict(meta["signature"])
    for name in arguments:
        if "tensordesc" in signature[name] or "TmaDesc" in signature[name]:
            raise CannotLower(f"kernel `{function.__name__}` takes tensor descriptors")
    attributes = meta["configs"][0]
    divisible = tuple(
        function.arg_names[index]
        for (index, *_), properties in sorted(attributes.items())
        if ["tt.divisibility", 16] in [list(each) for each in properties]
    )
    candidates = tuple(_candidate(tuner, config) for config in tuner.configs or ())
    text = _module(Path(function.fn.__code__.co_filename).read_text(encoding="utf-8"))
    described = json.dumps(
        [
            text.replace(function.__name__, "kernel"),
            signature,
            divisible,
            arguments,
            extra,
            [repr(c) for c in candidates],
        ]
    )
    base = re.sub(r"_[0-9]+$", "", function.__name__)[:_NAME_LENGTH]
    name = f"{base}_{hashlib.sha256(described.encode()).hexdigest()[:12]}"
    return KernelSource(
        name=name,
        text=re.sub(rf"\b{re.escape(function.__name__)}\b", name, text),
        signature=signature,
        divisible=divisible,
        arguments=arguments,
        grid_arguments=extra,
        candidates=candidates,
        operators=tuple(sorted({name for node in origins if (name := _operator(node))})),
        stack_traces=tuple(dict.fromkeys(node.meta["stack_trace"] for node in origins if node.meta.get("stack_trace"))),
    )


def _operator(node: torch.fx.Node) -> str | None:
    operator = node.meta.get("original_aten") or node.target
    return operator._schema.name if isinstance(operator, OpOverload) else None


def _candidate(tuner: CachingAutotuner, config: Any) -> Candidate:
    if getattr(config, "pre_hook", None) is not None:
        raise CannotLower(f"kernel `{tuner.fn.__name__}` has a configuration with a hook, which is Python code")
    meta = tuner._create_compile_meta(config)
    constants = dict(meta["constants"])
    for name, value in constants.items():
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise CannotLower(f"kernel `{tuner.fn.__name__}` has the constant `{name}` of type {type(value).__name__}")
    options = dict(tuner._create_compile_options(config, meta))
    return Candidate(constants, options, grid_of(tuner, config, constants))


def _module(text: str) -> str:
    """Return the source of a kernel's module without its ties to the compiler."""
    tree = ast.parse(text)
    lines = text.splitlines()
    removed: set[int] = set()
    for statement in tree.body:
        for first, last in _superfluous(statement):
            removed.update(range(first - 1, last))
    remaining = [line for index, line in enumerate(lines) if index not in removed]
    body = "\n".join(remaining).strip("\n")
    body = body.replace("import triton_helpers, triton_heuristics", "import triton_helpers")
    return re.sub(r"\n{3,}", "\n\n", body) + "\n"


def _superfluous(statement: ast.stmt) -> Iterator[tuple[int, int]]:
    """Yield the lines, from first to last, of a statement that a kernel does not need."""
    whole = (statement.lineno, statement.end_lineno or statement.lineno)
    if (isinstance(statement, ast.ImportFrom) and statement.module in _DROPPED_MODULES) or isinstance(
        statement, ast.Expr
    ):
        yield whole
    elif isinstance(statement, ast.FunctionDef):
        for decorator in statement.decorator_list:
            if "triton_heuristics" in ast.unparse(decorator):
                yield decorator.lineno, decorator.end_lineno or decorator.lineno


_BINARY = {ast.Add: "add", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le"}


def grid_of(tuner: CachingAutotuner, config: object, constants: Mapping[str, object]) -> tuple[Size, Size, Size]:
    """Return the blocks per axis of a kernel under one configuration, over the names of its arguments.

    `constants` are fixed arguments, which no launch takes. `CannotLower`: the format cannot express it.
    """
    grid = GridExpr.from_meta(tuner.inductor_meta, config)  # type: ignore[arg-type]
    known: dict[str, Size] = {name: value for name, value in constants.items() if type(value) is int}
    for line in grid.prefix:
        name, _, source = line.partition("=")
        known[name.strip()] = parse(source, known)
    x, y, z = (parse(str(source), known) for source in (grid.x_grid, grid.y_grid, grid.z_grid))
    return x, y, z


def parse(source: str, known: dict[str, Size] | None = None) -> Size:
    """Return the size that Python source computes; names without a value in `known` are symbols."""
    return _size(ast.parse(source.strip(), mode="eval").body, known or {}, source)


def _size(node: ast.expr, known: dict[str, Size], source: str) -> Size:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _negated(node.operand, known, source)
    if isinstance(node, ast.BinOp):
        left, right = _size(node.left, known, source), _size(node.right, known, source)
        if isinstance(node.op, ast.Sub):
            return SizeExpression(op="add", args=(left, SizeExpression(op="mul", args=(-1, right))))
        if type(node.op) in _BINARY:
            return SizeExpression(op=_BINARY[type(node.op)], args=(left, right))  # type: ignore[arg-type]
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        operands = (_size(node.left, known, source), _size(node.comparators[0], known, source))
        return SizeExpression(op=_COMPARE[type(node.ops[0])], args=operands)  # type: ignore[arg-type]
    if isinstance(node, ast.IfExp):
        parts = (node.test, node.body, node.orelse)
        return SizeExpression(op="where", args=tuple(_size(part, known, source) for part in parts))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
        operands = tuple(_size(operand, known, source) for operand in node.args)
        return operands[0] if len(operands) == 1 else SizeExpression(op=node.func.id, args=operands)  # type: ignore[arg-type]
    raise CannotLower(f"the grid `{source.strip()}` of a kernel cannot be expressed")


def _negated(operand: ast.expr, known: dict[str, Size], source: str) -> Size:
    """Return minus `operand`; `-(a // -b)` is a division rounded up."""
    if isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.FloorDiv):
        divisor = operand.right
        if isinstance(divisor, ast.UnaryOp) and isinstance(divisor.op, ast.USub):
            parts = (_size(operand.left, known, source), _size(divisor.operand, known, source))
            return SizeExpression(op="ceildiv", args=parts)
    value = _size(operand, known, source)
    return -value if isinstance(value, int) else SizeExpression(op="mul", args=(-1, value))
