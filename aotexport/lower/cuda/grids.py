"""Grids of kernels: Python source of the compiler to size expressions."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from aotexport.lower.cuda.retarget import CannotLower
from aotexport.torch_internals.inductor import CachingAutotuner, GridExpr
from aotexport_runtime.schema.sizes import Size, SizeExpression

_BINARY = {ast.Add: "add", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le"}


def grid_of(tuner: CachingAutotuner, config: object, constants: Mapping[str, object]) -> tuple[Size, Size, Size]:
    """Return the blocks per axis of a kernel under one configuration, over the names of its arguments.

    Args:
        tuner: the kernel.
        config: the configuration.
        constants: fixed arguments, which no launch takes.

    Raises:
        CannotLower: the format cannot express it.
    """
    grid = GridExpr.from_meta(tuner.inductor_meta, config)  # type: ignore[arg-type]
    known: dict[str, Size] = {name: value for name, value in constants.items() if type(value) is int}
    for line in grid.prefix:
        name, _, source = line.partition("=")
        known[name.strip()] = parse(source, known)
    x, y, z = (parse(str(source), known) for source in (grid.x_grid, grid.y_grid, grid.z_grid))
    return x, y, z


def parse(source: str, known: dict[str, Size] | None = None) -> Size:
    """Return the size that Python source computes.

    Args:
        source: an expression of integers.
        known: values of names; other names are symbols.

    Raises:
        CannotLower: it is not arithmetic alone.
    """
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
