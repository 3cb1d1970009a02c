"""Recorded calls of eager execution: the example, fresh random values, and other sizes of dynamic dimensions.

They decide whether an export is right, and ship as the bundle's self-test.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors.torch import save_file

from aotexport.capture.call import ExampleCall
from aotexport.capture.mode import in_mode
from aotexport.capture.sources import user_line
from aotexport.capture.state import State
from aotexport.encode.subclasses import CLASSES, encode_subclass
from aotexport.errors import ExportFailed
from aotexport.programs import Mode
from aotexport.restore import restored
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.observe import Inputs, Observation, make_inputs, observe
from aotexport_runtime.schema import encode_record
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput, StateInput
from aotexport_runtime.schema.sizes import Dimension
from aotexport_runtime.schema.vectors import Vector as VectorRecord
from aotexport_runtime.schema.vectors import VectorInput, VectorPart
from aotexport_runtime.self_test import flat_outputs
from aotexport_runtime.sizes import UNDEFINED, evaluate
from aotexport_runtime.subclasses import TensorTypes, is_wrapper, parts

_SEED = 20240229
_CALLS = 2
_MAX_NUMEL = 1 << 26
_MAX_INTEGER = 1 << 12


@dataclass(frozen=True)
class Vector:
    """A recorded call: its record, and the tensors it stores."""

    name: str
    record: VectorRecord
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Arguments:
    """Arguments of a call to record: what they are, and the spans of storage they are made of."""

    name: str
    specs: tuple[VectorInput, ...]
    stored: dict[str, torch.Tensor]


def record_vectors(call: ExampleCall, state: State, program: Program) -> tuple[Program, list[Vector]]:
    """Run the eager callable and record what a caller can see.

    Args:
        call: the example call.
        state: the module's state; left as it was.
        program: which program.

    Returns:
        The program, without the sizes 0 and 1 in its ranges where eager refuses them (a trace assumes larger ones, and
        holds no check for these), and the recorded calls; others that eager itself refuses are left out.

    Raises:
        ExportFailed: eager fails on the example itself.
    """
    example = _example_arguments(call, program)
    vectors = [_record(call, state, program, example)]
    generator = torch.Generator().manual_seed(_SEED)
    with contextlib.suppress(ExportFailed):
        vectors.append(_record(call, state, program, _random_arguments(example, generator)))
    for dimension in program.dimensions:
        if isinstance(program.inputs[dimension.input_index], SizeInput):
            continue
        small: list[Vector] = []
        for size in range(dimension.min or 0, 2):
            arguments = _small_arguments(program, example, dimension, size, generator)
            if arguments is None:
                continue
            try:
                small.append(_record(call, state, program, arguments))
            except ExportFailed:
                small.clear()
                program = _beginning_at(program, dimension.symbol, size + 1)
        vectors += small
    for arguments in (*_other_integers(program, example), *_resized_arguments(program, example, generator)):
        with contextlib.suppress(ExportFailed):
            vectors.append(_record(call, state, program, arguments))
    return program, vectors


def write_vectors(vectors: list[Vector], directory: Path) -> tuple[VectorEntry, ...]:
    """Write the vectors below `directory`; return their manifest entries."""
    folder = directory / "testvectors"
    folder.mkdir()
    entries: list[VectorEntry] = []
    for vector in vectors:
        stem = f"{vector.record.program}.{vector.name}"
        (folder / f"{stem}.json").write_bytes(encode_record(vector.record))
        save_file({key: _storable(t) for key, t in vector.tensors.items()}, folder / f"{stem}.safetensors")
        entries.append(
            VectorEntry(
                program=vector.record.program,
                name=vector.name,
                record=f"testvectors/{stem}.json",
                tensors=f"testvectors/{stem}.safetensors",
            )
        )
    return tuple(entries)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# --- arguments --------------------------------------------------------------------------------------------


def _example_arguments(call: ExampleCall, program: Program) -> _Arguments:
    by_path = dict(zip(call.paths, call.tensors, strict=True))
    stored: dict[str, torch.Tensor] = {}
    keys: dict[int, str] = {}
    specs: list[VectorInput] = []
    for spec in program.inputs:
        if isinstance(spec, StateInput):
            continue
        if isinstance(spec, SizeInput):
            specs.append(VectorInput(path=spec.path, value=by_path[spec.path]))
            continue
        tensor = by_path[spec.path]
        own = [_span(part, stored, keys) for part in parts(tensor)]
        flags = {"path": spec.path, "requires_grad": tensor.requires_grad, "is_leaf": tensor.is_leaf}
        subclass = encode_subclass(tensor, f"`{spec.path}`")
        if subclass is None:
            specs.append(VectorInput(**flags, **own[0]))
        else:
            specs.append(VectorInput(**flags, subclass=subclass, parts=tuple(VectorPart(**span) for span in own)))
    return _Arguments("example", tuple(specs), stored)


def _span(tensor: torch.Tensor, stored: dict[str, torch.Tensor], keys: dict[int, str]) -> dict[str, Any]:
    """Store the storage of a plain tensor, once; return where in it the tensor is."""
    pointer = tensor.untyped_storage().data_ptr()
    key = keys.setdefault(pointer if pointer else -len(keys) - 1, f"input{len(keys)}")
    if key not in stored:
        stored[key] = _whole_storage(tensor)
    return {
        "key": key,
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        "offset": int(tensor.storage_offset()),
        "is_complex": tensor.is_complex(),
    }


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(tensor.detach().untyped_storage(), 0, (count,), (1,)).cpu().clone()


def _random_arguments(example: _Arguments, generator: torch.Generator) -> _Arguments:
    stored = {key: _shuffled(tensor, generator) for key, tensor in example.stored.items()}
    return _Arguments("random", example.specs, stored)


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return other values of the same kind: a permutation, and for floats a little noise of the same scale.

    Ascending integers stay: kernels trust that offsets, lengths and positions are in order.
    """
    counts = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if counts and bool((tensor.to(torch.int64).diff() >= 0).all()):
        return tensor.clone()
    values = tensor[torch.randperm(tensor.numel(), generator=generator)]
    if not values.is_floating_point() or values.numel() < 2:
        return values
    wide = values.to(torch.float64)
    noisy = wide + 0.1 * wide.std() * torch.randn(values.shape, generator=generator, dtype=torch.float64)
    # Values that the model may rely on (probabilities, masks) keep their range.
    return noisy.clamp(wide.min(), wide.max()).to(values.dtype)


def _small_arguments(
    program: Program, example: _Arguments, dimension: Dimension, size: int, generator: torch.Generator
) -> _Arguments | None:
    """Return arguments with `dimension` at `size` and the others beyond 1; None: the program takes no such call."""
    symbols = {**_generic_sizes(program, example), dimension.symbol: size}
    if not _keeps_guards(program, symbols):
        return None
    return _resized(f"{_plain(dimension.name)}-is-{size}", program, example, symbols, generator)


def _plain(name: str) -> str:
    """Return the name of a dimension as part of a file's name: `x.shape[0]` is `x-shape-0`."""
    return re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")[:40]


def _keeps_guards(program: Program, symbols: dict[str, int]) -> bool:
    try:
        return all(evaluate(guard, symbols) for guard in program.guards)
    except UNDEFINED:
        return False


def _other_integers(program: Program, example: _Arguments) -> Iterator[_Arguments]:
    """Yield the example's arguments with other values of each dynamic integer, those among them that branches tell."""
    known = symbols_of(program, example.specs)
    for dimension in program.dimensions:
        if not isinstance(program.inputs[dimension.input_index], SizeInput):
            continue
        low, high = dimension.min, dimension.max
        here = known[dimension.symbol]
        for value in dict.fromkeys((0, 1, -1, here + 1, low, high)):
            if value is None or value == here or abs(value) > _MAX_INTEGER:
                continue
            if (low is not None and value < low) or (high is not None and value > high):
                continue
            symbols = {**known, dimension.symbol: value}
            if _keeps_guards(program, symbols) and _fits_shapes(program, example, symbols):
                name = f"{_plain(dimension.name)}-is-{value}".replace("--", "-minus-")
                yield _Arguments(name, _with_integers(program, example.specs, symbols), example.stored)


def symbols_of(program: Program, inputs: Sequence[VectorInput]) -> dict[str, int]:
    """Return the value of each symbol in a call with these inputs."""
    arguments = [index for index, spec in enumerate(program.inputs) if not isinstance(spec, StateInput)]
    specs = dict(zip(arguments, inputs, strict=True))
    symbols: dict[str, int] = {}
    for dimension in program.dimensions:
        spec = specs[dimension.input_index]
        size = spec.shape[dimension.axis] if spec.value is None else spec.value
        symbols[dimension.symbol] = (size - dimension.offset) // dimension.factor
    return symbols


def _fits_shapes(program: Program, example: _Arguments, symbols: dict[str, int]) -> bool:
    """Return whether the tensors of the example are what the program takes for these values of its symbols."""
    metas = [spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)]
    shapes = [spec.shape for spec in example.specs if spec.value is None]
    return all(
        tuple(evaluate(size, symbols) for size in meta.shape) == shape
        for meta, shape in zip(metas, shapes, strict=True)
    )


def _with_integers(
    program: Program, specs: tuple[VectorInput, ...], symbols: dict[str, int]
) -> tuple[VectorInput, ...]:
    values = {spec.path: symbols[spec.symbol] for spec in program.inputs if isinstance(spec, SizeInput)}
    return tuple(
        spec if spec.value is None else msgspec.structs.replace(spec, value=values[spec.path]) for spec in specs
    )


def _beginning_at(program: Program, symbol: str, least: int) -> Program:
    """Return the program with `least`, or the greatest value where that is less, as the least value of `symbol`."""
    dimensions = [
        msgspec.structs.replace(d, min=least if d.max is None else min(least, d.max)) if d.symbol == symbol else d
        for d in program.dimensions
    ]
    return msgspec.structs.replace(program, dimensions=tuple(dimensions))


def _generic_sizes(program: Program, example: _Arguments) -> dict[str, int]:
    """Return a value per symbol that is no special one, where the range has such; integers stay as in the example."""
    known = symbols_of(program, example.specs)
    integers = {spec.symbol for spec in program.inputs if isinstance(spec, SizeInput)}
    return {
        d.symbol: known[d.symbol]
        if d.symbol in integers
        else min(max(d.min or 0, 5 + 2 * i), d.max if d.max is not None else 1 << 30)
        for i, d in enumerate(program.dimensions)
    }


def _resized_arguments(program: Program, example: _Arguments, generator: torch.Generator) -> list[_Arguments]:
    if not program.dimensions:
        return []
    generic = _generic_sizes(program, example)
    least = {d.symbol: generic[d.symbol] if d.min is None else d.min for d in program.dimensions}
    candidates = {"least-sizes": least, "other-sizes": generic}
    return [
        arguments
        for name, symbols in candidates.items()
        if _keeps_guards(program, symbols)
        and (arguments := _resized(name, program, example, symbols, generator)) is not None
    ]


def _resized(
    name: str, program: Program, example: _Arguments, symbols: dict[str, int], generator: torch.Generator
) -> _Arguments | None:
    metas = iter([spec.meta for spec in program.inputs if isinstance(spec, ArgumentInput)])
    specs: list[VectorInput] = []
    stored: dict[str, torch.Tensor] = {}
    for index, spec in enumerate(_with_integers(program, example.specs, symbols)):
        if spec.value is not None:
            specs.append(spec)
            continue
        meta = next(metas)
        shape = tuple(evaluate(size, symbols) for size in meta.shape)
        stride = tuple(evaluate(step, symbols) for step in meta.stride)
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        source = example.stored.get(spec.key)
        # What sizes the parts of a tensor subclass have is for its class to say.
        if source is None:
            return None
        if count > _MAX_NUMEL or not source.numel():
            return None
        key = f"input{index}"
        stored[key] = source[torch.randint(source.numel(), (count,), generator=generator)]
        specs.append(
            VectorInput(
                path=spec.path,
                key=key,
                shape=shape,
                stride=stride,
                requires_grad=spec.requires_grad,
                is_leaf=spec.is_leaf,
                is_complex=spec.is_complex,
            )
        )
    return _Arguments(name, tuple(specs), stored)


# --- execution --------------------------------------------------------------------------------------------


def run_once(call: ExampleCall, state: State, mode: Mode) -> None:
    """Call the model for real on the example inputs; its tensors, the inputs and the random state stay as they are."""
    tensors = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in call.tensors
    ]
    args, kwargs = call.rebuild(tensors)
    with in_mode(call.module, mode, call.settled), restored(state):
        call.callable(*args, **kwargs)


def runs_without_gradients(call: ExampleCall, state: State) -> bool:
    """Return whether the model, in its current mode, runs under `torch.no_grad`: one that takes gradients may not."""
    mode: Mode = "function" if call.module is None else "train" if call.module.training else "eval"
    try:
        with torch.no_grad():
            run_once(call, state, mode)
    except RuntimeError:
        return False
    return True


def _record(call: ExampleCall, state: State, program: Program, arguments: _Arguments) -> Vector:
    try:
        with in_mode(call.module, program.mode, call.settled), restored(state), _attention_as_traced():
            seen = _observe_eager(call, state, program, arguments)
    except ExportFailed:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:300]
        raise ExportFailed(
            f"the model fails on its {arguments.name} inputs: {user_line(error)}{type(error).__name__}: {first}"
        ) from error
    values = {f"v{index}": value for index, value in enumerate(seen.values.values())}
    record = VectorRecord(
        program=program.name,
        seed=_SEED,
        calls=_CALLS,
        backward=program.grad,
        inputs=arguments.specs,
        facts=seen.facts,
        values=tuple(seen.values),
    )
    return Vector(arguments.name, record, {**arguments.stored, **values})


T = TypeVar("T")


def watch_example(
    call: ExampleCall, state: State, program: Program, look: Callable[[Callable[[], Any], list[Any]], T]
) -> T:
    """Return what `look` says of an eager call on the example inputs; everything stays as it was.

    Args:
        call: the example call.
        state: the module's state.
        program: which program.
        look: takes what calls the model, and its tensors and sizes, one per input of the program.
    """
    arguments = _example_arguments(call, program)
    eager, make = _eager(call, arguments)
    tensors = {entry.names[0]: entry.tensor for entry in state.entries}
    with in_mode(call.module, program.mode, call.settled), restored(state), _attention_as_traced():
        values = make().values
        own = iter(values)
        inputs = [tensors[spec.name] if isinstance(spec, StateInput) else next(own) for spec in program.inputs]
        with torch.set_grad_enabled(program.grad):
            return look(lambda: eager(values), inputs)


def _eager(call: ExampleCall, arguments: _Arguments) -> tuple[Callable[[list[Any]], Any], Callable[[], Inputs]]:
    """Return what calls the model on flat arguments, and what makes these anew."""
    device = next((leaf.device for leaf in call.tensors if isinstance(leaf, torch.Tensor)), None)
    own = {spec.path: index for index, spec in enumerate(arguments.specs)}
    form = Environment(tensor_types=TensorTypes(CLASSES)).form

    def eager(values: list[Any]) -> Any:
        tensors = [values[own[p]] if p in own else t for p, t in zip(call.paths, call.tensors, strict=True)]
        args, kwargs = call.rebuild(tensors)
        return call.callable(*args, **kwargs)

    return eager, lambda: make_inputs(arguments.specs, arguments.stored, device, form)


def _observe_eager(call: ExampleCall, state: State, program: Program, arguments: _Arguments) -> Observation:
    eager, make = _eager(call, arguments)

    def current_state() -> dict[str, torch.Tensor]:
        return {e.names[0]: e.slots[0][0][e.slots[0][1]] if e.slots else e.tensor for e in state.entries}

    def outputs(value: Any) -> list[tuple[str, Any]]:
        found = flat_outputs(program.output_tree, value)
        _check_classes(found, {type(tensor) for tensor in call.tensors})
        return found

    return observe(
        eager,
        make,
        [spec.path for spec in arguments.specs],
        current_state,
        outputs,
        seed=_SEED,
        calls=_CALLS,
        backward=program.grad,
    )


def _check_classes(outputs: list[tuple[str, Any]], given: set[type]) -> None:
    """Refuse outputs of a class of tensors that only the model's code makes: the runtime does not have it.

    Raises:
        ExportFailed: there is one.
    """
    known = {torch.Tensor, torch.nn.Parameter, *given}
    for name, value in outputs:
        if isinstance(value, torch.Tensor) and type(value) not in known and not is_wrapper(value):
            raise ExportFailed(
                f"{name} is a `{type(value).__qualname__}`, a class of tensors that a bundle cannot hold. Return a "
                "plain tensor (`as_subclass(torch.Tensor)`)"
            )


@contextlib.contextmanager
def _attention_as_traced() -> Iterator[None]:
    """Switch off torch's inference fast path of attention modules, which tracing cannot take.

    It gives the same values in another memory layout; see docs/decisions/0003-attention-fast-path.md.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
