"""The self-test: a loaded bundle against the results that were recorded from eager execution."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import msgspec
import torch

from aotexport_runtime.bundle.generated import generated_inputs
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.bundle.weights import read_tensors
from aotexport_runtime.call.engines import EngineRun, words
from aotexport_runtime.call.explain import ProgramExplanation
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs
from aotexport_runtime.call.whole_result import returning_whole_result, whole_result_tree
from aotexport_runtime.engines.autocast import device_type_of, under_autocast
from aotexport_runtime.engines.candidates import is_native, is_of
from aotexport_runtime.engines.impure import random_nodes
from aotexport_runtime.errors import BundleInvalid, NotSupported, SelfTestFailed
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.loading import check_target, load
from aotexport_runtime.schema.manifest import VectorEntry
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.schema.vectors import Vector
from aotexport_runtime.validate import check_vector
from aotexport_runtime.validate.bounds import span_end
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.compare import TOLERANCES, Difference, compare
from aotexport_runtime.values.observe import Observation, make_inputs, observe, spans

_MOST_ELEMENTS = 1 << 28
"""Most elements of an argument that repeats stored ones by a stride of 0."""

_LARGE_NBYTES = 64 << 20
"""Least size of weights that are freed before the next are loaded."""


class LoadKeywords(TypedDict, total=False):
    """Keywords of `load` that a recorded call may be run with, beside `target`."""

    device: Any
    trust: Literal["data", "native"]
    operator_namespaces: Iterable[str]
    tensor_types: Iterable[type] | Mapping[str, type]
    mapped: bool | None


@dataclass(frozen=True)
class VectorResult:
    """One recorded call, run again.

    Attributes:
        program: name of the program.
        vector: name of the recorded call.
        target: engine that ran it.
        differences: every compared quantity.
        error: the error of the call, or that the requested target ran none of it; empty: neither.
        device: where it ran.
        ran: the passes of the program that ran, with their engines.
        left_out: why values were not compared, but only shapes, dtypes and the like; empty: they were.
    """

    program: str
    vector: str
    target: str
    differences: list[Difference]
    error: str = ""
    device: str = ""
    ran: tuple[EngineRun, ...] = ()
    left_out: str = ""

    @property
    def agrees(self) -> bool:
        """Whether everything is within tolerance."""
        return not self.error and all(difference.agrees for difference in self.differences)


def selftest(
    path: str | os.PathLike[str],
    *,
    device: Any = None,
    target: str = "auto",
    trust: Literal["data", "native"] = "data",
    operator_namespaces: Iterable[str] = (),
    tensor_types: Iterable[type] | Mapping[str, type] = (),
    mapped: bool | None = None,
) -> list[VectorResult]:
    """Run every recorded call of the bundle at `path` and compare.

    Args:
        path: directory of the bundle.
        device: see `load`.
        target: see `load`.
        trust: see `load`.
        operator_namespaces: see `load`.
        tensor_types: see `load`.
        mapped: see `load`.

    Returns:
        One result per recorded call, all in agreement.

    Raises:
        SelfTestFailed: a result differs; the message lists the differences.
    """
    results = run_vectors(
        path,
        device=device,
        target=target,
        trust=trust,
        operator_namespaces=operator_namespaces,
        tensor_types=tensor_types,
        mapped=mapped,
    )
    failures = [line for result in results for line in describe_failures(result)]
    if failures:
        raise SelfTestFailed("the bundle disagrees with eager execution:\n" + "\n".join(failures))
    return results


def describe_failures(result: VectorResult) -> list[str]:
    """Return one line per quantity that differs."""
    where = f"  {result.program}/{result.vector} ({result.target}): "
    if result.error:
        return [f"{where}raised {result.error}"]
    lines: list[str] = []
    for difference in result.differences:
        if difference.agrees:
            continue
        if difference.expected or difference.got:
            lines.append(f"{where}{difference.name}: expected {difference.expected}, got {difference.got}")
        else:
            lines.append(f"{where}{difference.name}: relative error {difference.error:.2e}")
    return lines


def run_vectors(
    path: str | os.PathLike[str] | Bundle, *, target: str = "auto", **loading: Unpack[LoadKeywords]
) -> list[VectorResult]:
    """Run every recorded call, of a bundle at `path` or an open one, whether it agrees or not."""
    bundle = path if isinstance(path, Bundle) else open_bundle(path)
    if target == "onnx":
        raise NotSupported("the self-test runs programs by torch; `aotexport onnx` compares ONNX models with them")
    check_target(bundle, target, loading.get("trust", "data"), loading.get("device"))
    loading["operator_namespaces"] = tuple(loading.get("operator_namespaces", ()))
    results: list[VectorResult] = []
    for entry in bundle.manifest.testvectors:
        recorded = read_vector(bundle, entry)
        results.append(run_vector(bundle, entry.name, *recorded, target=target, **loading))
        compiled = [bundle.compiled(name, entry.program) for name in bundle.target_names]
        if target not in ("portable", "autograd") and any(c is not None and c.undefined_tangents for c in compiled):
            name = f"{entry.name}, backward from the loss"
            results.append(run_vector(bundle, name, *recorded, target=target, loss=True, **loading))
    return [without_target(result, results) for result in results]


def without_target(result: VectorResult, results: Iterable[VectorResult]) -> VectorResult:
    """Return a result, as a failure if the requested native target ran nothing of its program.

    Args:
        result: one of `results`.
        results: results of all recorded calls of the bundle.
    """
    own = [other for other in results if other.program == result.program]
    missed = is_native(result.target) and not any(is_of(run.engine, result.target) for o in own for run in o.ran)
    if result.error or not missed:
        return result
    said = f"target `{result.target}` ran nothing of program `{result.program}`: {words(result.ran) or 'nothing ran'}"
    return dataclasses.replace(result, error=said)


def run_vector(
    path: str | os.PathLike[str] | Bundle,
    name: str,
    vector: Vector,
    stored: dict[str, torch.Tensor],
    *,
    target: str = "auto",
    loss: bool = False,
    **loading: Unpack[LoadKeywords],
) -> VectorResult:
    """Load the bundle afresh and run a recorded call, the bundle's own or another.

    Args:
        path: directory of the bundle, or the open bundle.
        name: name of the recorded call.
        vector: its record.
        stored: its tensors.
        target: see `load`.
        loss: run a backward pass from the loss alone, and compare with the graph's; the record has no such pass.
        **loading: see `load`.
    """
    expected = recorded_observation(vector, stored)
    try:
        own, got, nbytes, engines = _observe_afresh(
            lambda: load(path, target=target, check_digests=False, **loading), vector, stored, loss=loss
        )
        # Graphs requested by name give eager's results. Other kernels, also those that `auto` finds on the machine,
        # round at other places, which shows in results of finer dtypes as well.
        least = 0.0 if target in ("portable", "autograd") else rounding(path, vector.program)
    except Exception as error:  # noqa: BLE001 - the call has failed, which the result says
        return VectorResult(vector.program, name, target, [], f"{type(error).__name__}: {error}")
    if nbytes > _LARGE_NBYTES:
        # The module refers to itself: it and its gradients would wait for the collector, beside those of the next. A
        # second collection finds the objects that nodes of autograd refer to.
        for _ in range(2):
            gc.collect()
    expected, left_out = own or expected, why_values_differ(path, vector.program, engines.device)
    if left_out:
        expected = dataclasses.replace(expected, values={})
    errors = {} if loss else vector.eager_errors
    differences = compare(expected, got, least=least, eager_errors=errors)
    ran = engines.has_run or ()
    return VectorResult(vector.program, name, target, differences, device=engines.device, ran=ran, left_out=left_out)


def why_values_differ(path: str | os.PathLike[str] | Bundle, name: str, device: str) -> str:
    """Return why the values of a program are others than recorded ones, by its random numbers; empty: they are not."""
    bundle = path if isinstance(path, Bundle) else open_bundle(path, check_digests=False)
    program = bundle.program(name)
    here, there = device.partition(":")[0], device_type_of(program, None)
    if here in ("", there) or not random_nodes(bundle.graph(name, program.forward.file)):
        return ""
    return f"it draws random numbers, others on {here} than on {there}"


def recorded_observation(vector: Vector, stored: Mapping[str, torch.Tensor]) -> Observation:
    """Return the observation of eager execution in a recorded call."""
    return Observation(dict(vector.facts), {name: stored[f"v{index}"] for index, name in enumerate(vector.values)})


def rounding(path: str | os.PathLike[str] | Bundle, program: str) -> float:
    """Return the tolerance of the coarsest dtype that `program` computes in."""
    bundle = path if isinstance(path, Bundle) else open_bundle(path, check_digests=False)
    nodes = bundle.graph(program, bundle.program(program).forward.file).nodes
    computed = {dtypes.dtype(node.meta.dtype) for node in nodes if isinstance(node.meta, TensorMeta)}
    return max((TOLERANCES.get(dtype, 0.0) for dtype in computed), default=0.0)


def _observe_afresh(
    loaded: Callable[[], BundleModule], vector: Vector, stored: dict[str, torch.Tensor], *, loss: bool
) -> tuple[Observation | None, Observation, int, ProgramExplanation]:
    """Return the expected observation (None: the recorded one), the new one, the bytes of the state, the engines."""
    module = loaded()
    expected = observe_vector(module.twin(target="portable"), vector, stored, loss=True) if loss else None
    got = observe_vector(module, vector, stored, loss=loss)
    nbytes = sum(tensor.nbytes for tensor in module.state_tensors().values())
    return expected, got, nbytes, module.explain_program(vector.program)


def read_vector(bundle: Bundle, entry: VectorEntry) -> tuple[Vector, dict[str, torch.Tensor]]:
    """Return a recorded call with its stored tensors.

    Raises:
        BundleInvalid: the record is invalid, or does not fit the stored tensors.
    """
    vector = bundle.record(entry.record, Vector)
    check_vector(vector, bundle.program(entry.program), where=entry.record)
    stored = read_tensors(bundle.file(entry.tensors), where=entry.tensors)
    for spec, dtype, made in generated_inputs(vector, bundle.program(entry.program)):
        stored[spec.key] = torch.from_numpy(made).to(dtypes.dtype(dtype))
    for spec in vector.inputs:
        for part in spans(spec):
            if span_end(part.shape, part.stride, part.offset) > _numel(stored, part.key):
                raise BundleInvalid(
                    f"argument {spec.path!r} reaches past the end of {part.key!r}",
                    where=entry.record,
                    code="vector-malformed",
                )
            if math.prod(part.shape) > max(_MOST_ELEMENTS, _numel(stored, part.key)):
                raise BundleInvalid(
                    f"argument {spec.path!r} repeats {part.key!r} too often",
                    where=entry.record,
                    code="vector-malformed",
                )
    for key in {part.key for spec in vector.inputs for part in spans(spec) if part.is_complex}:
        stored[key] = torch.view_as_complex(stored[key])
    missing = [name for index, name in enumerate(vector.values) if f"v{index}" not in stored]
    if missing:
        raise BundleInvalid(f"no tensor of {missing[0]!r}", where=entry.tensors, code="vector-malformed")
    return vector, stored


def _numel(stored: dict[str, torch.Tensor], key: str) -> int:
    return len(stored[key]) if key in stored else 0


def record_again(
    module: BundleModule, entry: VectorEntry, make: Callable[[str], BundleModule] | None = None
) -> tuple[Vector, dict[str, torch.Tensor]]:
    """Return a recorded call with the current results of `module`, by its forward graph if that is differentiable.

    Args:
        module: a loaded bundle; left as it is.
        entry: which recorded call of its bundle.
        make: makes the module to call, for an engine, where no copy of the state and no gradient of all of it shall be
            in memory; None: a copy of `module` is called.
    """
    vector, stored = read_vector(module.bundle, entry)
    program = module.bundle.program(vector.program)
    reference = "autograd" if program.forward.differentiable or not vector.backward else "portable"
    called = module.twin(target=reference) if make is None else make(reference)
    seen = observe_vector(called, vector, stored, sparing=make is not None and reference == "autograd")
    inputs = {
        part.key: torch.view_as_real(stored[part.key]) if part.is_complex else stored[part.key]
        for spec in vector.inputs
        if not spec.quantiles
        for part in spans(spec)
    }
    record = msgspec.structs.replace(vector, facts=seen.facts, values=tuple(seen.values))
    return record, {**inputs, **{f"v{index}": value for index, value in enumerate(seen.values.values())}}


def observe_vector(
    module: BundleModule, vector: Vector, stored: dict[str, torch.Tensor], *, loss: bool = False, sparing: bool = False
) -> Observation:
    """Run a recorded call on a loaded bundle; return what was observed.

    Args:
        module: the loaded bundle; left in the mode of the call, and changed as the calls change it.
        vector: the record.
        stored: its tensors.
        loss: see `run_vector`.
        sparing: see `observe`.
    """
    program = module.bundle.program(vector.program)
    module.train(program.mode == "train")
    function = returning_whole_result(program, module.program(vector.program))
    arguments = arguments_of(program)
    device = next((tensor.device for tensor in module.state_tensors().values()), module.device)

    def call(values: list[Any]) -> Any:
        args, kwargs = arguments(values, module.state_tensors())
        return function(*args, **kwargs)

    with under_autocast(device_type_of(program, device), program.autocast):
        return observe(
            call,
            lambda: make_inputs(vector.inputs, stored, device, module.form),
            [spec.path for spec in vector.inputs],
            module.state_tensors,
            lambda value: flat_outputs(whole_result_tree(program), value),
            seed=vector.seed,
            calls=vector.calls,
            backward=vector.backward,
            loss=loss,
            dropped=vector.dropped_gradients,
            sample=vector.sample,
            sparing=sparing,
        )
