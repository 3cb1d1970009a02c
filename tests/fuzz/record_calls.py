"""`python -m tests.fuzz.record_calls`: add calls that operators of the list take to `results/valid_calls.jsonl`.

They are those of the samples of torch's own tests, forward and backward, before and after composite operators are taken
apart, up to three an operator; what these never call was written by hand. A line per operator has what arguments and
results were: of tensors the dtype, the shape and the range of values.
"""

import json
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: TID251
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # noqa: TID251

from aotexport_runtime.allowed.operators import allowed_aten_operators
from tests.fuzz.valid_calls import CALLS, valid_calls
from tests.sweeps import modules, operators
from tests.sweeps.sample import Sample

_MOST_CALLS = 3
_MOST_ELEMENTS = 1000


class _Calls:
    """Calls of operators of the list, as they are seen."""

    def __init__(self) -> None:
        self.allowed = allowed_aten_operators()
        self.of: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def see(self, function: Any, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        """Note a call, unless it is large, of another list, or one of many."""
        if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":  # noqa: TID251
            return
        name = f"{function.overloadpacket.__name__}.{function._overloadname}"
        if name not in self.allowed or len(self.of[name]) >= _MOST_CALLS:
            return
        arguments = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
        try:
            call = {key: _pattern(value) for key, value in arguments.items()}
            call["results"] = [_pattern(value) for value in tree_leaves(results)]
        except ValueError:
            return
        self.of[name][json.dumps(call)] = None


class _Recorder(TorchDispatchMode):
    """Sees the calls of kernels."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
        results = function(*args, **kwargs)
        self._calls.see(function, before, kwargs, results)
        return results


class _Composites(Interpreter):
    """Sees the calls of a graph."""

    def __init__(self, graph: torch.fx.GraphModule, calls: _Calls) -> None:
        super().__init__(graph)
        self._calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        results = super().call_function(target, args, kwargs)
        self._calls.see(target, args, kwargs, results)
        return results


def _pattern(value: Any) -> Any:
    """Return what an argument is, as JSON.

    Raises:
        ValueError: it is large, or of a kind that is not drawn.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() > _MOST_ELEMENTS or value.layout is not torch.strided:
            raise ValueError(value)
        whole = not (value.is_floating_point() or value.is_complex())
        numbers = value.flatten().tolist()  # Not all of these dtypes have a minimum.
        limits = [int(min(numbers)), int(max(numbers))] if whole and numbers else None
        return {"dtype": _name(value.dtype), "shape": list(value.shape), "range": limits}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, list | tuple):
        return [_pattern(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return None
    raise ValueError(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _see_sample(sample: Sample, calls: _Calls) -> None:
    with _Recorder(calls):
        results = sample.function(*sample.args, **sample.kwargs)
        wanted = [value for value in tree_leaves(results) if isinstance(value, torch.Tensor) and value.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(value) for value in wanted])
    graph = make_fx(lambda args: sample.function(*args, **sample.kwargs), pre_dispatch=True)(sample.args)
    _Composites(graph, calls).run(*tree_leaves(sample.args))


def _see_samples(calls: _Calls) -> None:
    for name, samples in {**operators.items(), **modules.items()}.items():
        try:
            for sample in samples():
                _see_sample(sample, calls)
        except Exception as error:
            print(f"{name}: {type(error).__name__}")


def main() -> None:
    """Record the calls, and write them."""
    warnings.simplefilter("ignore")
    calls = _Calls()
    for name, seen in valid_calls().items():
        calls.of[name] |= dict.fromkeys(map(json.dumps, seen))
    _see_samples(calls)
    found = {name: [*map(json.loads, seen)] for name, seen in calls.of.items() if seen}
    lines = [{"operator": name, "calls": seen} for name, seen in sorted(found.items())]
    CALLS.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    print(f"{len(lines)} of {len(calls.allowed)} operators")


if __name__ == "__main__":
    main()
