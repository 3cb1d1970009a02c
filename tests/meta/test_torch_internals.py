"""A probe per private name of torch that the exporter uses: when torch moves one, the failure says which."""

import ast
import functools
import importlib
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


def is_found(symbol: str) -> bool:
    """Return whether there is an object at a dotted name: the longest module that imports, then attributes."""
    parts = symbol.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            functools.reduce(getattr, parts[count:], found)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_private_names_are_where_the_exporter_looks_for_them():
    assert [symbol for symbol in SYMBOLS if not is_found(symbol)] == [], f"moved in torch {torch.__version__}"
