"""A probe per private name of torch that the exporter uses: when torch moves one, the failure says which."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# What torch's compiler says about itself when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

FILES = sorted((Path(__file__).parents[2] / "aotexport" / "torch_internals").glob("*.py"))


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return, per name that a file imports from torch, where it is."""
    names = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return names


def _chains(file: Path) -> Iterator[str]:
    """Yield every dotted name of a file that begins with an imported one."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = _imported(tree)
    yield from imported.values()
    for node in ast.walk(tree):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and node.id in imported:
            yield ".".join([imported[node.id], *path])


SYMBOLS = sorted(
    {
        *(chain for file in FILES for chain in _chains(file)),
        "torch.compiler._is_compiling_flag",
        "torch.compiler._is_exporting_flag",
    }
    # Of builds with CUDA alone; lowering brings its own where it is missing.
    - {"torch._C._cuda_getCurrentRawStream"}
)

MEMBERS = {
    "torch._functorch.aot_autograd.JointWithDescriptors": ["graph_module", "_aot_state"],
    "torch._functorch._aot_autograd.schemas.AOTState": ["fw_metadata"],
    "torch._functorch._aot_autograd.schemas.MemoryFormatMeta": ["stride", "memory_format"],
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": ["suppress_guards", "is_unbacked_symint"],
    "torch._subclasses.fake_tensor.FakeTensorMode": ["shape_env"],
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner": [
        *("fn", "configs", "triton_meta", "inductor_meta", "compile_results"),
        *("_create_compile_meta", "_create_compile_options"),
    ],
    "torch._inductor.runtime.triton_heuristics.GridExpr": ["from_meta", "prefix", "x_grid", "y_grid", "z_grid"],
    "torch._inductor.codegen.wrapper.KernelCallLine": ["kernel_name", "call_args", "raw_args"],
    "torch._inductor.codegen.wrapper.SymbolicCallArg": ["inner_expr"],
    "torch._inductor.codegen.wrapper_fxir.WrapperFxCodegen": [
        *("_generate", "make_zero_buffer", "get_fx_graph_inputs", "run_wrapper_ir_passes", "supports_caching")
    ],
    "torch._inductor.codegen.wrapper_fxir.FxConverter": [
        *("_generate_graph_inputs", "_generate_graph_input_shapes", "_generate_sym_node", "_generate_triton_call"),
        *("_generate_buffer", "buffer_to_node", "expr_to_proxy", "kernels"),
    ],
}
"""Members of torch's classes that the exporter reads from objects."""

KEYWORDS = {
    "torch.fx.experimental.proxy_tensor.make_fx": [
        *("tracing_mode", "pre_dispatch", "record_stack_traces", "_allow_non_fake_inputs")
    ],
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors": ["ignore_shape_env"],
    "torch.fx.passes.runtime_assert.insert_deferred_runtime_asserts": ["export"],
    "torch.fx.Graph.eliminate_dead_code": ["is_impure_node"],
    "torch._functorch.partitioners.min_cut_rematerialization_partition": [
        *("num_fwd_outputs", "static_lifetime_input_indices")
    ],
    "torch._inductor.compile_fx._recursive_joint_graph_passes": ["input_device"],
}
"""Keyword arguments that the exporter passes."""


def find(symbol: str) -> Any:
    """Return the object at a dotted name: the longest module that imports, then attributes."""
    parts = symbol.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            assert hasattr(found, part), moved(symbol)
            found = getattr(found, part)
        return found
    raise AssertionError(moved(symbol))


def moved(what: str) -> str:
    return f"torch {torch.__version__} has no `{what}`, which the exporter uses"


@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_private_name_is_where_the_exporter_looks_for_it(symbol):
    find(symbol)


@pytest.mark.parametrize("class_", MEMBERS)
def test_private_class_has_the_members_that_the_exporter_reads(class_):
    found = find(class_)
    assigned = inspect.getsource(found)
    for member in MEMBERS[class_]:
        assert hasattr(found, member) or f"{member}:" in assigned or f"self.{member} =" in assigned, moved(
            f"{class_}.{member}"
        )


@pytest.mark.parametrize("function", KEYWORDS)
def test_private_function_takes_the_keywords_that_the_exporter_passes(function):
    parameters = inspect.signature(find(function)).parameters
    for keyword in KEYWORDS[function]:
        assert keyword in parameters, moved(f"{function}({keyword}=...)")
