"""Compile functional graphs to CPU libraries; torch's compiler is imported late, which takes seconds."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# The tracing context gives AOTAutograd the fake mode and shape environment to use.
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.numbers import int_oo

from aotexport.process.patches import Patch, patched

_AS_EAGER = {"emulate_precision_casts": True, "fallback_random": True}
"""Options of the compiler and of traces for it: fused operators round to 16 bits between operators as eager does, and
random operators stay whole, so that they draw eager's numbers."""


def symbolic_sizes(sizes: Mapping[str, tuple[int, int | None]]) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """Return a fake mode with fresh symbolic integers, each by its current value and its greatest one (None: any).

    The least value is 2.
    """
    from torch._dynamo.source import ConstantSource

    environment = ShapeEnv()
    symbols: dict[str, torch.SymInt] = {}
    for name, (value, high) in sizes.items():
        source = ConstantSource(name)
        symbol = environment.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        environment.constrain_symbol_range(symbol, 2, int_oo if high is None else high)
        size = environment.create_symintnode(symbol, hint=value, source=source)
        assert isinstance(size, torch.SymInt)
        symbols[name] = size
    return FakeTensorMode(shape_env=environment), symbols


def trace_decomposed(
    function: Callable[..., Any], fakes: Sequence[torch.Tensor], fake_mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """Trace a functional function of flat tensors, on fakes, to the operators that torch's compiler fuses."""
    # The decomposition of max pooling needs `lowering`, and does not import it.
    from torch._inductor import config, lowering  # noqa: F401

    with config.patch(_AS_EAGER), fake_mode, torch.no_grad(), tracing(TracingContext(fake_mode)):
        tracer = make_fx(function, decompositions(), tracing_mode="real", _allow_non_fake_inputs=True)
        return tracer(*fakes)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of torch's compiler, and one of scaled sums, whose scale it loses beside a product.

    Source: torch 2.13, `_inductor/fx_passes/post_grad.py`: `addmm` in place of `add(mm, x, alpha=2)`.
    """
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), torch.ops.aten.add.Tensor: _scaled_sum}


def _scaled_sum(left: Any, right: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if alpha == 1 else left + right * alpha


def compile_library(
    module: torch.fx.GraphModule,
    fakes: Sequence[torch.Tensor],
    fake_mode: FakeTensorMode,
    path: Path,
    *,
    march: str,
    vector_nbits: int,
    ordered: bool,
    header: str,
) -> None:
    """Compile a graph of `trace_decomposed`, with its fake inputs, to the library `path`, by AOTInductor.

    The graph is changed in place; its results keep the strides that they were traced with. Indices are not checked
    against bounds: see `hold_indices`. `march` is the instruction set as the C++ compiler names it, `vector_nbits` the
    width of vector registers; `ordered` operators keep their order, since they draw random numbers; `header` is C++
    to put between torch's headers and the library's code. `NotImplementedError`: it calls operators for which
    libraries have no entry point.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.virtualized import V

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        options = {
            **_AS_EAGER,
            **compile_fx.get_cpp_wrapper_config(),
            "aot_inductor.output_path": f"{scratch}/library.so",
            "assert_indirect_indexing": False,
            "cpp_wrapper": True,
            "cpp.dynamic_threads": True,
            "cpp.march": march,
            "cpp.simdlen": vector_nbits,
            "cpp.threads": 4,
            "reorder_for_peak_memory": not ordered,
        }
        stack.enter_context(torch.no_grad())
        stack.enter_context(config.patch(options))
        stack.enter_context(pools_by_torch())
        stack.enter_context(V.set_aot_compilation(True))
        stack.enter_context(V.set_fake_mode(fake_mode))
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(_code_for_processors(vector_nbits, header))
        (output,) = module.graph.find_nodes(op="output")
        compiled: Any = compile_fx.compile_fx_forward(
            module,
            list(fakes),
            num_orig_model_outputs=len(output.args[0]),
            num_example_inputs=len(fakes),
            compiler_config_extra=compile_fx.create_compiler_config_extra(module),
            inner_compile=functools.partial(compile_fx.compile_fx_inner, cpp_wrapper=True),
            is_inference=True,
        )
        called = [file for file in Path(scratch).glob("*.json") if not file.name.endswith("_metadata.json")]
        if called:
            # The runner could call them through a table beside the library.
            nodes = json.loads(called[0].read_text())["nodes"]
            raise NotImplementedError(f"no stable entry point for {sorted({node['node']['target'] for node in nodes})}")
        shutil.copyfile(compiled.filename, path)
    _strip(path)


def vectors(nbits: int) -> Any:
    """Return torch's record of vectors of a width, without what this machine has beyond the level of instructions."""
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512

    if nbits != 512:
        return VecAVX2()
    found = VecAVX512()
    # This looks once for bfloat16 instructions, which level 4 of x86-64 does not have.
    bool(found)
    found._is_avx512_bf16_supported = False
    return found


def _code_for_processors(vector_nbits: int, header: str) -> contextlib.AbstractContextManager[None]:
    """Let the compiler write C++ for vectors of a width, with loops of any number of threads, after `header`."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    isa = vectors(vector_nbits)
    decide = CppKernel.decide_parallel_depth
    write_header = CppWrapperCpu.write_header

    def write_header_and_ours(self: CppWrapperCpu) -> None:
        write_header(self)
        self.header.splice(header)

    def decide_at_compile_time(self: CppKernel, *args: Any) -> Any:
        # Thread counts at run time would make every loop parallel, even one over three elements.
        with config.patch({"cpp.dynamic_threads": False}):
            return decide(self, *args)

    return patched(
        Patch(cpu_vec_isa, "valid_vec_isa_list", lambda: [isa], "Compile for the wanted vectors"),
        Patch(CppKernel, "decide_parallel_depth", decide_at_compile_time, "Leave short loops to one thread"),
        Patch(CppWrapperCpu, "write_header", write_header_and_ours, "Add the header of matmuls"),
    )


def _strip(library: Path) -> None:
    """Strip symbols for debuggers, four fifths of a library, if there is a tool for it."""
    tool = shutil.which("strip")
    if tool is not None:
        subprocess.run([tool, "--strip-unneeded", str(library)], check=True)


# --- errors of torch 2.13's compiler ---------------------------------------------------------------------------

aten: Any = torch.ops.aten
_LEAST_OF_32_BITS = torch.iinfo(torch.int32).min


def pools_by_torch() -> contextlib.AbstractContextManager[None]:
    """Leave gradients of average pools that the compiler computes wrongly to torch's operators.

    The compiler's code divides by the whole window where the window reaches past the padding (`ceil_mode`); torch
    counts only the elements inside.
    """
    from torch._inductor import lowering

    fallbacks = {
        aten.avg_pool2d_backward.default: lowering.fallback_avg_pool2d_backward,
        aten.avg_pool3d_backward.default: lowering.fallback_avg_pool3d_backward,
    }
    reason = "Count the elements inside of the padding in gradients of average pools"
    lowerings: Any = lowering.lowerings
    return patched(
        *[Patch(lowerings, op, _pool(lowerings[op], other), reason, "torch>=2.16") for op, other in fallbacks.items()]
    )


def _pool(lowered: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, counts_padding: bool, divisor: Any = None
    ) -> Any:
        function = fallback if ceil and counts_padding and divisor is None else lowered
        return function(grad, x, kernel, stride, padding, ceil, counts_padding, divisor)

    return run


def wide_negative_integers() -> contextlib.AbstractContextManager[None]:
    """Pass integers below -2^31 to kernels of users in 64 bits; the compiler checks only the upper bound."""
    from torch._inductor.codegen import triton_utils
    from torch._inductor.utils import expr_fits_within_32bit as fits_above
    from torch._inductor.virtualized import V

    def fits(value: Any) -> bool:
        if not fits_above(value):
            return False
        graph: Any = V.graph
        sizes = graph.sizevars
        if sizes.statically_known_true(value >= _LEAST_OF_32_BITS):
            return True
        if not sizes.shape_env.has_guarding_hint(value) or sizes.guarding_hint_or_throw(value) < _LEAST_OF_32_BITS:
            return False
        sizes.check_leq(_LEAST_OF_32_BITS, value)
        return True

    reason = "Pass integers below -2^31 to kernels in 64 bits"
    return patched(Patch(triton_utils, "expr_fits_within_32bit", fits, reason, "torch>=2.16"))
