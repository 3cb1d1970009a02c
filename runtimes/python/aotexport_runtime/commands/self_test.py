"""The self-test: a loaded bundle against the results that were recorded from eager execution."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import msgspec
import torch

from aotexport_runtime.bundle.cast_programs import CastPrograms, cast_dtypes
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs, returning_whole_result, whole_result_tree
from aotexport_runtime.commands.onnx_calls import observed, recorded, without_orders
from aotexport_runtime.commands.results import VectorResult, describe_failures
from aotexport_runtime.engines.candidates import AUTOGRAD, CUDA, MODEL_ENGINES, ONNX, PORTABLE, is_native, is_of
from aotexport_runtime.engines.runs import EngineRun, ProgramExplanation, kind_of, words
from aotexport_runtime.errors import NotSupported, SelfTestFailed, first_line
from aotexport_runtime.execution.autocast import device_type_of, under_autocast
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import cast_bundle
from aotexport_runtime.module.loading import LoadOptions, check_target, load
from aotexport_runtime.module.onnx_module import compose_onnx, runtime_of
from aotexport_runtime.module.recorded import read_vector, recorded_observation
from aotexport_runtime.rewrite.impure import random_nodes
from aotexport_runtime.schema.manifest import OnnxModel, VectorEntry
from aotexport_runtime.schema.program import Program
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.schema.vectors import Vector, spans
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.compare import TOLERANCES, compare
from aotexport_runtime.values.observe import Observation, make_inputs, observe

_LARGE_NBYTES = 64 << 20
"""Least size of weights that are freed before the next are loaded."""


class LoadKeywords(TypedDict, total=False):
    """Keywords of `load` that a recorded call may be run with, beside `target`."""

    device: Any
    trust: Literal["data", "native"]
    operator_namespaces: Iterable[str]
    tensor_types: Iterable[type] | Mapping[str, type]
    mapped: bool | None


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
    """Run every recorded call of the bundle at `path` by every graph that it ships, and compare.

    Args:
        path: directory of the bundle.
        device: see `load`.
        target: the engine to test alone, see `load`; `auto`: every one that the bundle has something for, which are
            forward graphs, joint or inference graphs, libraries and kernels (with `trust="native"`), ONNX models, and
            forward graphs for loads in another dtype.
        trust: see `load`.
        operator_namespaces: see `load`.
        tensor_types: see `load`.
        mapped: see `load`.

    Returns:
        One result per recorded call and engine, all in agreement; one per engine of a program that cannot run here.

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


def run_vectors(
    path: str | os.PathLike[str] | Bundle, *, target: str = "auto", **loading: Unpack[LoadKeywords]
) -> list[VectorResult]:
    """Run every recorded call, of a bundle at `path` or an open one, whether it agrees or not; see `selftest`."""
    bundle = path if isinstance(path, Bundle) else open_bundle(path)
    loading["operator_namespaces"] = tuple(loading.get("operator_namespaces", ()))
    if target == "auto":
        pairs = [(program, engine) for program in bundle.program_names for engine in _engines(bundle, program)]
        results = [result for pair in pairs for result in _run_if_here(bundle, *pair, **loading)]
        return [*results, *(r for d in cast_dtypes(bundle.manifest) for r in _run_cast(bundle, d, **loading))]
    if target in MODEL_ENGINES and not bundle.manifest.onnx:
        raise NotSupported("the bundle has no ONNX models; add them with `aotexport onnx`")
    if target in MODEL_ENGINES:
        return [result for model in bundle.manifest.onnx for result in _run_onnx(bundle, model, target)]
    check_target(bundle, LoadOptions(target=target, **loading))
    entries = bundle.manifest.testvectors
    entries = [e for e in entries if _autocasts_alike(bundle.program(e.program), loading.get("device"))]
    results = _run(bundle, entries, target, **loading)
    return [without_target(result, results) for result in results]


def _engines(bundle: Bundle, program: str) -> Iterator[str]:
    """Yield the engines that a bundle has something of a program for."""
    yield AUTOGRAD
    if bundle.program(program).functional is not None:
        yield PORTABLE
    if bundle.has_target(CUDA, program):
        yield CUDA
    for target in bundle.target_names:
        if bundle.compiled(target, program) is not None:
            yield target
    if any(model.program == program for model in bundle.manifest.onnx):
        yield ONNX


def _run_if_here(bundle: Bundle, program: str, engine: str, **loading: Unpack[LoadKeywords]) -> list[VectorResult]:
    """Return the results of a program by an engine, or one that says why it cannot run here."""
    entries = [entry for entry in bundle.manifest.testvectors if entry.program == program]
    results: list[VectorResult] = []
    reason, record = "" if entries else "the bundle has no recorded call of it", bundle.program(program)
    if engine == AUTOGRAD and record.grad and not record.forward.differentiable:
        reason, entries = "it lacks the backward of a custom function, which the joint graph has", []
    if not _autocasts_alike(record, loading.get("device")):
        reason, entries = "it was captured under autocast on another kind of device", []
    try:
        if engine == ONNX:
            results = [
                each for m in bundle.manifest.onnx if m.program == program for each in _run_onnx(bundle, m, engine)
            ]
        elif entries:
            check_target(bundle, LoadOptions(target=engine, **loading))
            results = _run(bundle, entries, engine, exact=False, **loading)
    except NotSupported as error:
        reason = str(error).rpartition(f"; not {engine}: ")[2]
    runs = dict.fromkeys(run for result in results for run in result.ran)
    if all(result.agrees for result in results) and not any(is_of(run.engine, engine) for run in runs):
        reason = reason or f"no recorded call meets its guards: {words(runs)}"
        return [VectorResult(program, "", engine, [], graph=_graph_of(bundle, program, engine), not_run=reason)]
    return results


def _run(
    bundle: Bundle, entries: Sequence[VectorEntry], target: str, *, exact: bool = True, **loading: Unpack[LoadKeywords]
) -> list[VectorResult]:
    results: list[VectorResult] = []
    for entry in entries:
        recorded = read_vector(bundle, entry)
        results.append(run_vector(bundle, entry.name, *recorded, target=target, exact=exact, **loading))
        compiled = [bundle.compiled(name, entry.program) for name in bundle.target_names]
        if target not in (PORTABLE, AUTOGRAD) and any(c is not None and c.undefined_tangents for c in compiled):
            name = f"{entry.name}, backward from the loss"
            results.append(run_vector(bundle, name, *recorded, target=target, loss=True, **loading))
    return [dataclasses.replace(each, graph=_graph_of(bundle, each.program, target)) for each in results]


def _run_cast(bundle: Bundle, dtype: str, **loading: Unpack[LoadKeywords]) -> Iterator[VectorResult]:
    """Yield the results of the programs that a bundle holds for loads in a dtype."""
    try:
        cast = cast_bundle(bundle, dtypes.dtype(dtype))
    except NotSupported as error:
        yield VectorResult("", "", AUTOGRAD, [], graph=f"forward graphs in {dtype}", not_run=str(error))
        return
    for program in sorted(cast.own):
        yield from _run_if_here(cast, program, AUTOGRAD, **loading)


def _graph_of(bundle: Bundle, program: str, target: str) -> str:
    """Return what a target runs of a program, in words."""
    if isinstance(bundle, CastPrograms):
        return f"{kind_of(target)} in {bundle.dtype}"
    functional = bundle.program(program).functional
    if target == PORTABLE and functional is None:
        target = AUTOGRAD
    if target == PORTABLE and functional is not None:
        return "inference graph" if functional.gradients is None else "joint graph"
    return "ONNX model" if target in MODEL_ENGINES else kind_of(target)


def _run_onnx(bundle: Bundle, model: OnnxModel, engine: str) -> list[VectorResult]:
    """Run the recorded calls of a program by its ONNX model."""
    program, state = bundle.program(model.program), dict[str, Any]()
    plan = compose_onnx(bundle, program, model, runtime_of(engine), state)
    least, results = rounding(bundle, program.name), list[VectorResult]()
    for calls in recorded(bundle, program, model):
        orders = without_orders(bundle.graph(program.name, program.forward.file), program, calls)
        result = VectorResult(program.name, calls.name, engine, [], graph="ONNX model")
        try:
            got = observed(program, model, calls, lambda *args, **kwargs: plan(args, kwargs), state)
        except Exception as error:  # noqa: BLE001 - errors of runtimes have no class in common
            results.append(dataclasses.replace(result, error=f"{type(error).__name__}: {first_line(error)}"))
            continue
        result = dataclasses.replace(
            result,
            differences=compare(calls.expected, got, least=least, eager_errors=calls.eager_errors),
            device=plan.record.device,
            ran=(EngineRun("forward", engine),),
            left_out=f"{', '.join(orders)} of equal values may have another order" if orders else "",
        )
        results.append(result)
    return results


def _autocasts_alike(program: Program, device: Any) -> bool:
    """Return whether a program captured under autocast takes calls on a device; None: where it was captured."""
    return program.autocast is None or device is None or torch.device(device).type == device_type_of(program, None)


def without_target(result: VectorResult, results: Iterable[VectorResult]) -> VectorResult:
    """Return one of `results`, as a failure if the requested native target ran nothing of its program."""
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
    exact: bool = True,
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
        exact: whether graphs requested by name have to give eager's results on the machine of the export.
        **loading: see `load`.
    """
    expected = recorded_observation(vector, stored)
    try:
        bundle = path if isinstance(path, Bundle) else open_bundle(path, check_digests=False)
        own, got, nbytes, engines = _observe_afresh(
            lambda: load(bundle, target=target, check_digests=False, **loading), vector, stored, loss=loss
        )
        # Graphs requested by name give eager's results. Other kernels, also those that `auto` finds on the machine,
        # round at other places, which shows in results of finer dtypes as well.
        least = least_tolerance(bundle, vector.program, exact=exact and target in (PORTABLE, AUTOGRAD))
    except Exception as error:  # noqa: BLE001 - the call has failed, which the result says
        return VectorResult(vector.program, name, target, [], f"{type(error).__name__}: {error}")
    if nbytes > _LARGE_NBYTES:
        # The module refers to itself: it and its gradients would wait for the collector, beside those of the next. A
        # second collection finds the objects that nodes of autograd refer to.
        for _ in range(2):
            gc.collect()
    expected, left_out = own or expected, why_values_differ(bundle, vector.program, engines.device)
    if left_out:
        expected = dataclasses.replace(expected, values={})
    errors = {} if loss else vector.eager_errors
    differences = compare(expected, got, least=least, eager_errors=errors)
    ran = engines.has_run or ()
    return VectorResult(vector.program, name, target, differences, device=engines.device, ran=ran, left_out=left_out)


def why_values_differ(bundle: Bundle, name: str, device: str) -> str:
    """Return why the values of a program are others than recorded ones, by its random numbers; empty: they are not."""
    program = bundle.program(name)
    here, there = device.partition(":")[0], device_type_of(program, None)
    if here in ("", there) or not random_nodes(bundle.graph(name, program.forward.file)):
        return ""
    return f"it draws random numbers, others on {here} than on {there}"


def least_tolerance(bundle: Bundle, program: str, *, exact: bool) -> float:
    """Return the least tolerance of results: 0 where a program rounds as eager does (`exact`), but under autocast."""
    return 0.0 if exact and bundle.program(program).autocast is None else rounding(bundle, program)


def rounding(bundle: Bundle, program: str) -> float:
    """Return the tolerance of the coarsest dtype that `program` computes in."""
    nodes = bundle.graph(program, bundle.program(program).forward.file).nodes
    computed = {node.meta.dtype for node in nodes if isinstance(node.meta, TensorMeta)}
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
