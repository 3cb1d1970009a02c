"""`python -m tests.fuzz.writes`: print how calls of every operator of the list change what they take, as JSON."""

import json
import resource
from collections.abc import Iterator
from typing import Any

import torch

from aotexport_runtime.allowed.operators import allowed_aten_operators
from aotexport_runtime.execution import ops
from tests.fuzz.arguments import Arguments, copied
from tests.fuzz.operators import tensors_of
from tests.fuzz.valid_calls import valid_calls_of

CALLS = 8
_MOST_NBYTES = 8 << 30


def _memory(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        return b""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy().tobytes()


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.data_ptr()


def _changes(operator: str) -> Iterator[str]:
    """Yield how calls of an operator change what they take: `bytes`, `sizes`, each with `unseen` if no version rose."""
    function = ops.resolve(f"aten::{operator}", None, frozenset())
    for call in range(CALLS):
        args, kwargs = Arguments(f"{operator} {call} writes", valid_calls_of(operator)).of(function._schema)
        args, kwargs = copied(args), {name: copied(value) for name, value in kwargs.items()}
        taken = [*tensors_of([args, [*kwargs.values()]])]
        before = [(_memory(tensor), _geometry(tensor), tensor._version) for tensor in taken]
        try:
            function(*args, **kwargs)
        except Exception:  # Whatever a kernel says to arguments that do not fit.
            continue
        for tensor, (memory, geometry, version) in zip(taken, before, strict=True):
            unseen = " unseen" if tensor._version == version else ""
            if _geometry(tensor)[:4] != geometry[:4]:
                yield f"sizes{unseen}"
            elif _geometry(tensor) != geometry or _memory(tensor) != memory:
                yield f"bytes{unseen}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_NBYTES, _MOST_NBYTES))
    print(json.dumps({name: sorted({*_changes(name)}) for name in sorted(allowed_aten_operators())}))
