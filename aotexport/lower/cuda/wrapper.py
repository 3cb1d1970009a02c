"""The compiler's program as a graph: operator calls, allocations, and launches of kernels.

Built on the converter of torch's compiler, which gets some programs wrong (torch 2.13): grids of a user's kernels with
compile-time constants, arguments of a launch that are numbers or views, inputs that are expressions of sizes or the
same size twice, operators without a result, zeroed workspaces, copies to a buffer. Launches are converted here from the
arguments of the compiler's own launcher, and sizes are expressed in the program's symbols alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

import sympy
import torch

from aotexport.torch_internals.inductor import (
    CachingAutotuner,
    FileBackedGraphModule,
    FxConverter,
    IRNode,
    NonOwningLayout,
    SymbolicCallArg,
    WrapperFxCodegen,
    WrapperLine,
    convert_to_symint,
    get_constexprs,
    lowered_nodes,
)


def launch(**arguments: Any) -> None:
    """A node's target for the launch of a kernel, its arguments by keyword.

    `meta['tuner']` of the node holds the kernel, `meta['origins']` the nodes that were fused in it.
    """


def capturing(captured: Callable[[torch.fx.GraphModule], None]) -> type[WrapperFxCodegen]:
    """Return a wrapper class for the compiler that hands its programs to `captured` as graphs."""

    class Wrapper(WrapperFxCodegen):
        supports_caching = False

        def _generate(self, is_inference: bool) -> tuple[FileBackedGraphModule, None]:
            self.run_wrapper_ir_passes(is_inference)
            module = _Converter(
                lines=self.lines,
                prologue="\n".join([self.imports.getvalue(), self.header.getvalue()]),
                graph_inputs=self.get_fx_graph_inputs(),
                graph_outputs=self.get_graph_outputs(),
                subgms=self.subgms,
                is_subgraph=self.is_subgraph,
            ).generate()
            captured(module)
            return FileBackedGraphModule(module, _never), None

        def make_zero_buffer(self, name: str) -> Any:
            return _CallLine(torch.ops.aten.zero_.default, name)

        def codegen_device_copy(self, src: str, dst: str, non_blocking: bool | str) -> None:
            self.writeline(_CallLine(torch.ops.aten.copy_.default, dst, src))

    return Wrapper


def _never(*inputs: Any) -> Any:
    raise RuntimeError("a graph that was compiled for another machine does not run on this one")


class _CallLine(WrapperLine):
    """Calls an operator in place on buffers: zeroes a workspace, copies the contents of a value to a buffer."""

    def __init__(self, function: Any, *names: str) -> None:
        self.function, self.names = function, names

    def codegen(self, code: Any) -> None:
        code.writeline(f"{self.function}({', '.join(self.names)})")

    def codegen_fx(self, converter: Any) -> Callable[[_CallLine], None]:
        return converter.call


class _Converter(FxConverter):
    def call(self, line: _CallLine) -> None:
        """Convert a call in place."""
        nodes = [self.buffer_to_node.get(name) for name in line.names]
        if None in nodes:
            raise NotImplementedError(f"the compiler calls `{line.function}` on {', '.join(line.names)}")
        self.gm.graph.call_function(line.function, tuple(nodes))

    def _generate_graph_inputs(self) -> None:
        """Make a placeholder per input, and one per symbol, whose values a run of the program knows."""
        everything = self.graph_inputs
        for name, value in everything.items():
            if isinstance(value, sympy.Expr | int):
                self.buffer_to_node[name] = self._placeholder(name, value)
            else:
                self.graph_inputs = {name: value}
                super()._generate_graph_inputs()
        self.graph_inputs = everything
        symbols = {symbol for value in everything.values() for symbol in _symbols(value)}
        for symbol in sorted(symbols, key=str):
            self.expr_to_proxy[symbol] = torch.fx.Proxy(self._placeholder(f"size_{symbol}", symbol), self.tracer)

    def _placeholder(self, name: str, expression: Any) -> torch.fx.Node:
        node = self.gm.graph.placeholder(name)
        node.meta["val"] = convert_to_symint(sympy.sympify(expression))
        return node

    def _generate_graph_input_shapes(self) -> None:
        """Leave sizes of inputs to the symbols."""

    def _generate_unbacked_symbol_defs(self, line: Any) -> None:
        """Skip calls that define no sizes: checks have no result, and so no node."""
        if line.unbacked_bindings:
            super()._generate_unbacked_symbol_defs(line)

    def _generate_reinterpret_helper(self, input_buffer: Any, result_buffer: Any, layout: Any) -> None:
        """Add the view of another dtype that the compiler's own conversion leaves out."""
        super()._generate_reinterpret_helper(input_buffer, result_buffer, layout)
        view: Any = layout.view if isinstance(layout, NonOwningLayout) else None
        dtype = layout.dtype if view is None else view.layout.dtype
        if dtype != input_buffer.get_dtype():
            name = result_buffer.get_name()
            same = self.buffer_to_node[name]
            node = self.gm.graph.call_function(torch.ops.aten.view.dtype, (same, dtype))
            node.meta["val"] = same.meta["val"].view(dtype)
            self.buffer_to_node[name] = node

    def _generate_sym_node(self, s: Any) -> Any:
        if s is None or isinstance(s, bool | float | str | torch.fx.Node):
            return s
        return float(s) if isinstance(s, sympy.Float) else super()._generate_sym_node(s)

    @cached_property
    def _origins(self) -> dict[str, list[torch.fx.Node]]:
        """Nodes that each kernel was made of, by the name of the kernel."""
        return {}

    def _generate_kernel_definition(self, line: Any) -> None:
        super()._generate_kernel_definition(line)
        self._origins[line.kernel_name] = _nodes_named_in(line.metadata or "")

    def _generate_triton_call(self, line: Any) -> None:
        tuner = self.kernels[line.kernel_name].tuner
        names = launch_arguments(tuner)
        values = [self._argument(argument, line) for argument in line.call_args]
        passed = {name: value for name, value in zip(names, values, strict=True) if name in runtime_arguments(tuner)}
        node = self.gm.graph.call_function(launch, kwargs=passed)
        node.meta["tuner"] = tuner
        node.meta["origins"] = self._origins.get(line.kernel_name, [])

    def _argument(self, argument: Any, line: Any) -> Any:
        if isinstance(argument, SymbolicCallArg):
            argument = argument.inner_expr
        if not isinstance(argument, str):
            return self._generate_sym_node(argument)
        if argument in self.buffer_to_node:
            return self.buffer_to_node[argument]
        # The compiler passes views to the user's kernels as source text.
        for raw in line.raw_args or ():
            if isinstance(raw, IRNode) and raw.codegen_reference() == argument:
                return self._generate_buffer(raw)
        raise NotImplementedError(f"kernel {line.kernel_name} is given `{argument}`")


def _nodes_named_in(metadata: str) -> list[torch.fx.Node]:
    """Return the nodes that the compiler's comment above a kernel names, in lines `#   operator => node, node`."""
    nodes = lowered_nodes()
    names = [name for group in re.findall(r"^#   \S+ => (.+)$", metadata, re.MULTILINE) for name in group.split(", ")]
    return [nodes[name] for name in names if name in nodes]


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, sympy.Expr):
        return set(value.free_symbols)
    if isinstance(value, IRNode):
        expressions = [sympy.sympify(size) for size in (*value.get_size(), *value.get_stride())]
        return set().union(*(expression.free_symbols for expression in expressions))
    return set()


def launch_arguments(tuner: CachingAutotuner) -> list[str]:
    """Return the names of the arguments that the compiler's launcher of a kernel takes, in order.

    Source: torch 2.13, `_inductor/runtime/triton_heuristics.py`, `TritonCompileResult._get_arg_lists`.
    """
    declared = {tuner.fn.arg_names[index] for index in get_constexprs(tuner.fn)} | {"num_warps", "num_stages"}
    constants = _default_meta(tuner)["constants"]
    names = [name for name in tuner.fn.arg_names if name not in declared or name not in constants]
    return [*names, *tuner.inductor_meta.get("extra_launcher_args", ())]


def runtime_arguments(tuner: CachingAutotuner) -> list[str]:
    """Return the names of the arguments that are not fixed when a kernel is compiled: parameters, then the grid's."""
    meta = _default_meta(tuner)
    signature, constants = meta["signature"], meta["constants"]
    parameters = [name for name in tuner.fn.arg_names if signature.get(name, "constexpr") != "constexpr"]
    extra = tuner.inductor_meta.get("extra_launcher_args", ())
    return [name for name in parameters if name not in constants] + list(extra)


def _default_meta(tuner: CachingAutotuner) -> dict[str, Any]:
    """Return the compiler's metadata of a kernel's first configuration; names are the same in all."""
    assert tuner.configs
    return tuner._create_compile_meta(tuner.configs[0])
