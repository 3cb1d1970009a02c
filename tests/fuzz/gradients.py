"""`python -m tests.fuzz.gradients [REGEX]`: differentiate hostile calls of every operator of the list.

The memory is guarded as `tests.fuzz.guarded` says. A random part of the floating arguments requires grad. After the
call, its integers and some of its floats get other values past their version counters, and tensors get other sizes by
operators of a bundle: whatever a graph can do to what autograd has saved. Then backward runs, often backward of
backward; or the call itself runs in forward mode.
"""

import argparse
import json
import random
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from aotexport_runtime.allowed.operators import aten_signatures
from aotexport_runtime.execution import ops
from tests.fuzz.arguments import Arguments, copied
from tests.fuzz.guarded import Note, rows_of, run_guarded, seen_twice
from tests.fuzz.operators import bytes_of, tensors_of
from tests.fuzz.valid_calls import valid_calls_of

RESULTS = Path(__file__).parent / "results" / "gradients.json"
SEED = "grad"
CALLS = 1200
_COUNTS = ("calls", "taken", "backward", "double", "forward")
_MOST_WITHOUT = 60
"""After how many calls without a backward pass an operator is left."""
_HOSTILE = (-1, 0, 1, 2, 5, 100, -100, 1 << 15, 1 << 31, -(1 << 31), 1 << 40, -(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True)
class Row:
    """The result of an operator.

    Attributes:
        operator: `base.overload`.
        calls: how many sets of arguments.
        counts: how many calls were taken, passes of `backward` and `double`, and calls in mode `forward`.
        outcome: `ok`, or the number of the call that went wrong and how.
    """

    operator: str
    calls: int
    counts: dict[str, int]
    outcome: str


fuzz = partial(rows_of, "tests.fuzz.gradients", Row)


def _call_often(operator: str, calls: range, note: Note) -> None:
    function = ops.resolve(f"aten::{operator}", None, frozenset())
    valid = valid_calls_of(operator)
    counts = Counter[str]()
    for call in calls:
        if call - calls.start > _MOST_WITHOUT and not counts["backward"]:
            break
        note(call, counts, "ended before its last call")
        draw = partial(Arguments(f"{operator} {call} {SEED}", valid).of, function._schema)
        first, second = seen_twice(draw, partial(_Differentiated, function, f"{operator} {call}"))
        counts.update(second.counts)
        if first.seen != second.seen:
            note(call, counts, f"call {call}: uninitialised bytes")
            return
    note(call + 1, counts, "ok")


class _Differentiated:
    """One call with its passes; `seen` are the bytes of gradients, `counts` how many passes were taken."""

    def __init__(self, function: Any, seed: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._random = random.Random(seed)
        self.seen = list[bytes]()
        self.counts = Counter[str]()
        torch.default_generator.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self._chance(0.15):
                    self._forward_mode(args, kwargs)
                else:
                    self._backward(args, kwargs)
        except Exception:  # Whatever torch says to hostile arguments.
            return

    def __bool__(self) -> bool:
        return bool(self.counts)

    def _chance(self, part: float) -> bool:
        return self._random.random() < part

    def _forward_mode(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        with forward_ad.dual_level():
            results = self._function(
                *map(self._dual, map(copied, args)),
                **{name: self._dual(copied(value)) for name, value in kwargs.items()},
            )
            self.counts["forward"] += 1
            for result in tensors_of(results):
                tangent = forward_ad.unpack_dual(result).tangent
                self.seen += [] if tangent is None else [bytes_of(tangent)]

    def _dual(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._dual(item) for item in value]
        if not _is_differentiable(value) or self._chance(0.3):
            return value
        return forward_ad.make_dual(value, torch.full_like(value, self._random.choice((1, 0.5, 1e30))))

    def _backward(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._leaves = list[torch.Tensor]()
        schema = self._function._schema
        written = {argument.name for argument in schema.arguments if argument.is_write}
        names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        part = self._random.choice((0.3, 0.8, 1))
        given = [self._leaf(copied(value), part, name in written) for name, value in zip(names, args, strict=True)]
        named = {name: self._leaf(copied(value), part, name in written) for name, value in kwargs.items()}
        results = self._function(*given, **named)
        self.counts["taken"] += 1
        roots = [tensor for tensor in tensors_of(results) if tensor.requires_grad]
        if not roots or not self._leaves:
            return
        for tensor in (*tensors_of([*given, *named.values()]), *tensors_of(results)):
            self._change(tensor)
        roots = [root for root in roots if self._chance(0.7)] or roots[:1]
        create = self._chance(0.5)
        grads = self._passed(roots, self._leaves, create)
        self.counts["backward"] += 1
        again = [grad for grad in grads if grad is not None and grad.requires_grad]
        if again:
            self._passed(again, [*self._leaves, *self._tangents], False)
            self.counts["double"] += 1

    def _leaf(self, value: Any, part: float, written: bool) -> Any:
        if isinstance(value, list):
            return [self._leaf(item, part, written) for item in value]
        if not _is_differentiable(value) or not self._chance(part):
            return value
        value.requires_grad_()
        self._leaves.append(value)
        return value.mul(1) if written else value

    def _change(self, tensor: torch.Tensor) -> None:
        """Change a tensor that autograd may have saved, past its version counter, or its sizes."""
        if tensor.numel() == 0 or tensor.layout is not torch.strided:
            return
        data = tensor.data
        if tensor.dtype == torch.bool:
            if self._chance(0.5):
                data.view(torch.uint8).fill_(self._random.choice((0, 1, 2, 255)))
        elif not (tensor.is_floating_point() or tensor.is_complex()):
            if self._chance(0.6):
                info, value = torch.iinfo(tensor.dtype), self._random.choice(_HOSTILE)
                place = data.select(0, -1) if data.dim() and self._chance(0.5) else data
                place.fill_(min(max(value, info.min), info.max))
        elif self._chance(0.15):
            data.fill_(self._random.choice((float("nan"), float("inf"), 1e30, -1e30, 0)))
        if self._chance(0.1):
            self._reshape(tensor)

    def _reshape(self, tensor: torch.Tensor) -> None:
        name, others = self._random.choice(
            (
                ("set_data.default", (torch.ones((*tensor.shape, 2), dtype=tensor.dtype),)),
                ("set_data.default", (torch.ones(tensor.shape[:-1], dtype=tensor.dtype),)),
                ("set_data.default", (torch.ones(tensor.numel(), dtype=tensor.dtype),)),
                ("resize_.default", ([size + 1 for size in tensor.shape],)),
                ("resize_.default", ([1],)),
                ("unsqueeze_.default", (0,)),
                ("transpose_.default", (0, -1)),
                ("set_.source_Tensor", (torch.ones((*tensor.shape, 2), dtype=tensor.dtype),)),
            )
        )
        try:
            ops.resolve(f"aten::{name}", None, frozenset())(tensor, *others)
        except Exception:  # Tensors that require grad keep their sizes.
            return

    def _passed(self, roots: list[torch.Tensor], leaves: list[torch.Tensor], create: bool) -> list[Any]:
        # Sizes are those that autograd knows: metadata of a root may have changed.
        self._tangents = [torch.ones_like(root).requires_grad_(create and _is_differentiable(root)) for root in roots]
        if self._chance(0.2):
            self._tangents = [tangent.detach().sum().expand(tangent.shape) for tangent in self._tangents]
        grads = torch.autograd.grad(roots, leaves, self._tangents, create_graph=create, allow_unused=True)
        self.seen += [bytes_of(grad) for grad in grads if grad is not None]
        return list(grads)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def differentiable() -> list[str]:
    """Return the operators of this torch that autograd may record: not those that write into what `out` gives them."""
    return sorted(
        name
        for name, text in aten_signatures().items()
        if "!" not in text.partition("*, ")[2].partition("->")[0]
        and hasattr(getattr(torch.ops.aten, name.partition(".")[0], None), name.partition(".")[2])
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.gradients", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="REGEX", help="operators to differentiate; default: all")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--record", action="store_true", help="write the sums of this torch, and go on where they end")
    parser.add_argument("--guarded", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.guarded is not None:
        run_guarded(*options.guarded, options.operators, "counts", _call_often)
        return
    wanted = [n for n in differentiable() if any(re.search(pattern, n) for pattern in options.operators or [""])]
    records = json.loads(RESULTS.read_text())
    kind = {"seed": SEED, "calls of each": options.calls, "of": len(wanted)}
    record = records.get(torch.__version__, {}) if options.record else {}
    if {name: record.get(name) for name in kind} != kind:
        record = {**kind, "operators": 0, "wrong": {}}
    # What went wrong is tried again, and counts when it no longer does.
    for row in fuzz([*record["wrong"], *wanted[record["operators"] :]], options.calls):
        record["operators"] += row.operator not in record["wrong"]
        if row.outcome != "ok":
            record["wrong"][row.operator] = row.outcome
            print(f"{row.operator}: {row.outcome}", flush=True)
        else:
            record["wrong"].pop(row.operator, None)
            record |= Counter(**row.counts, calls=row.calls) + Counter({name: record.get(name, 0) for name in _COUNTS})
        if record["operators"] % 20 == 0 or record["operators"] == len(wanted):
            print(json.dumps(record), flush=True)
            if options.record:
                RESULTS.write_text(json.dumps(records | {torch.__version__: record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
