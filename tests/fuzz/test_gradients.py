"""A slice of the fuzzing of gradients, and which formulas of autograd trust integers that it has saved."""

import contextlib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen

from aotexport_runtime.allowed.operators import allowed_aten_operators
from aotexport_runtime.execution import ops
from aotexport_runtime.execution.preconditions.table import KEPT, PRECONDITIONS
from tests.fuzz.arguments import Arguments
from tests.fuzz.gradients import differentiable, fuzz
from tests.fuzz.valid_calls import valid_calls_of

FORMULAS = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
CHECKED = {name.partition(".")[0] for name in PRECONDITIONS}


def test_gradients_of_hostile_calls_stay_within_their_memory() -> None:
    names = differentiable()
    kept = [name for name in names if name.partition(".")[0] in KEPT]
    lists = [name for name in names if name.endswith("_.ScalarList")]
    rows = list(fuzz([*kept, *lists[::4], *names[::150]], 12))
    assert [row for row in rows if row.outcome != "ok"] == []
    assert sum(row.counts.get("backward", 0) for row in rows) > 50
    assert sum(row.counts.get("double", 0) for row in rows) > 10


def _formulas() -> dict[str, str]:
    """Return the formulas of autograd by operator, `base.overload`."""
    entries = re.split(r"^- name: ", FORMULAS.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for entry in entries:
        signature, _, formulas = entry.partition("\n")
        name = signature.partition("(")[0]
        found[name if "." in name else f"{name}.default"] = formulas
    return found


def _is_checked(function: str) -> bool:
    """Return whether a function is a checked kernel, or is named after one: it then calls it."""
    return any(function in (base, f"{base}_symint") or function.startswith(f"{base}_mat") for base in CHECKED)


def _saves_integers(operator: str) -> bool:
    """Return whether autograd saves a tensor of integers or a mask of a valid call."""
    saved = list[torch.dtype]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.dtype)
        return tensor

    function = ops.resolve(f"aten::{operator}", None, frozenset())
    names = [argument.name for argument in function._schema.arguments if not argument.kwarg_only]
    for call, seed in itertools.product(valid_calls_of(operator), range(8)):
        named = {name: _leaf(Arguments(f"{seed}")._like(value)) for name, value in call.items() if name != "results"}
        given = [named.pop(name) for name in names if name in named]
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            contextlib.suppress(RuntimeError),
        ):  # some arguments may not require grad
            function(*given, **named)
    return any(not dtype.is_floating_point and not dtype.is_complex for dtype in saved)


def _leaf(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_leaf, value)]
    is_leaf = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_leaf else value


@pytest.mark.filterwarnings("ignore")
def test_operators_whose_formulas_call_checked_kernels_on_saved_integers_keep_copies() -> None:
    formulas = _formulas()
    assert len(formulas) > 500
    trusting = {
        name
        for name in formulas.keys() & allowed_aten_operators()
        if any(map(_is_checked, re.findall(r"(\w+)\(", formulas[name]))) and _saves_integers(name)
    }
    assert {"_ctc_loss.default", "_grouped_mm.default", "max_pool2d_with_indices.default"} <= trusting
    assert {name for name in trusting if name.partition(".")[0] not in KEPT} == set()
