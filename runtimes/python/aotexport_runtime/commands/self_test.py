"""The self-test: a loaded bundle against the results that were recorded from eager execution."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from aotexport_runtime.bundle.cast_programs import CastPrograms, cast_dtypes
from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.call.flat_call import arguments_of, flat_outputs, returning_whole_result, whole_result_tree
from aotexport_runtime.commands.onnx_calls import calling, observed, recorded, without_orders
from aotexport_runtime.commands.results import VectorResult, check_results, least_tolerance, rounding
from aotexport_runtime.engines.candidates import AUTOGRAD, CUDA, MODEL_ENGINES, ONNX, PORTABLE, is_native, is_of
from aotexport_runtime.engines.runs import EngineRun, kind_of, words
from aotexport_runtime.errors import NotSupported, attempt, first_line
from aotexport_runtime.execution.autocast import device_type_of, under_autocast
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import CastBundle
from aotexport_runtime.module.loading import LoadOptions, Source, check_target, load_module
from aotexport_runtime.module.onnx_module import compose_onnx, runtime_of
from aotexport_runtime.module.optimizer import SEED
from aotexport_runtime.module.recorded import read_vector, recorded_observation
from aotexport_runtime.rewrite.names import random_nodes
from aotexport_runtime.schema.manifest import OnnxModel, VectorEntry
from aotexport_runtime.schema.program import ArgumentInput, Program
from aotexport_runtime.schema.vectors import Vector, spans
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.arguments import keywords_of
from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Observation, make_inputs, observe

_LARGE_NBYTES = 64 << 20
"""Least size of weights that are freed before the next are loaded."""


@keywords_of(LoadOptions)
def selftest(path: Source, options: LoadOptions) -> list[VectorResult]:
    """Run every recorded call of the bundle at `path` by every graph that it ships, and compare.

    Args:
        path: directory of the bundle, or the open bundle.
        options: as keywords, those of `load`. `target` is the engine to test alone; `auto`: every one that the bundle
            has something for, which are forward graphs, joint or inference graphs, libraries and kernels (with
            `trust="native"`), ONNX models, and forward graphs for loads in another dtype.

    Returns:
        One result per recorded call and engine, all in agreement; one per engine of a program that cannot run here.

    Raises:
        SelfTestFailed: a result differs; the message lists the differences.
        NotSupported: `dtype` or `taps` is given, with which calls return other values than recorded.
    """
    results = _results(path, options)
    check_results(results)
    return results


@keywords_of(LoadOptions)
def run_vectors(path: Source, options: LoadOptions) -> list[VectorResult]:
    """Run every recorded call, whether it agrees or not; see `selftest`."""
    return _results(path, options)


def _results(path: Source, options: LoadOptions) -> list[VectorResult]:
    if options.dtype is not None or options.taps:
        raise NotSupported("a self-test takes neither `dtype` nor `taps`, with which calls return other values")
    bundle, target = path if isinstance(path, Bundle) else open_bundle(path), options.target
    options = options.verified(bundle)
    if target == "auto":
        pairs = [(program, engine) for program in bundle.program_names for engine in _engines(bundle, program)]
        results = [result for pair in pairs for result in _run_if_here(bundle, *pair, options)]
        return [*results, *(r for d in cast_dtypes(bundle.manifest) for r in _run_cast(bundle, d, options))]
    if target in MODEL_ENGINES and not bundle.manifest.onnx:
        raise NotSupported("the bundle has no ONNX models; add them with `aotexport onnx`")
    if target in MODEL_ENGINES:
        return [result for model in bundle.manifest.onnx for result in _run_onnx(bundle, model, options)]
    check_target(bundle, options)
    entries = bundle.manifest.testvectors
    entries = [e for e in entries if _autocasts_alike(bundle.program(e.program), options.device)]
    results = _run(bundle, entries, options)
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


def _run_if_here(bundle: Bundle, program: str, engine: str, options: LoadOptions) -> list[VectorResult]:
    """Return the results of a program by an engine, or one that says why it cannot run here."""
    entries = [entry for entry in bundle.manifest.testvectors if entry.program == program]
    options, results = replace(options, target=engine), list[VectorResult]()
    reason, record = "" if entries else "the bundle has no recorded call of it", bundle.program(program)
    if engine == AUTOGRAD and record.grad and not record.forward.differentiable:
        reason, entries = "it lacks the backward of a custom function, which the joint graph has", []
    if not _autocasts_alike(record, options.device):
        reason, entries = "it was captured under autocast on another kind of device", []
    try:
        if engine == ONNX:
            models = [model for model in bundle.manifest.onnx if model.program == program]
            results = [result for model in models for result in _run_onnx(bundle, model, options)]
        elif entries:
            check_target(bundle, options)
            results = _run(bundle, entries, options, exact=False)
    except NotSupported as error:
        reason = str(error).rpartition(f"; not {engine}: ")[2]
    runs = dict.fromkeys(run for result in results for run in result.ran)
    if all(result.agrees for result in results) and not any(is_of(run.engine, engine) for run in runs):
        reason = reason or f"no recorded call meets its guards: {words(runs)}"
        return [VectorResult(program, "", engine, [], graph=_graph_of(bundle, program, engine), not_run=reason)]
    return results


def _run(
    bundle: Bundle, entries: Sequence[VectorEntry], options: LoadOptions, *, exact: bool = True
) -> list[VectorResult]:
    results: list[VectorResult] = []
    for entry in entries:
        recorded = read_vector(bundle, entry)
        results.append(run_vector(bundle, entry.name, *recorded, options, exact=exact))
        compiled = [bundle.compiled(name, entry.program) for name in bundle.target_names]
        if options.target not in (PORTABLE, AUTOGRAD) and any(c is not None and c.undefined_tangents for c in compiled):
            name = f"{entry.name}, backward from the loss"
            results.append(run_vector(bundle, name, *recorded, options, loss=True))
    return [replace(each, graph=_graph_of(bundle, each.program, options.target)) for each in results]


def _run_cast(bundle: Bundle, dtype: str, options: LoadOptions) -> Iterator[VectorResult]:
    """Yield the results of the programs that a bundle holds for loads in a dtype."""
    try:
        cast = CastBundle(bundle, dtypes.dtype(dtype))
    except NotSupported as error:
        yield VectorResult("", "", AUTOGRAD, [], graph=f"forward graphs in {dtype}", not_run=str(error))
        return
    for program in sorted(cast.own):
        yield from _run_if_here(cast, program, AUTOGRAD, options)


def _graph_of(bundle: Bundle, program: str, target: str) -> str:
    """Return what a target runs of a program, in words."""
    if isinstance(bundle, CastPrograms):
        return f"{kind_of(target)} in {bundle.dtype}"
    if target == PORTABLE:
        functional, target = bundle.program(program).functional, AUTOGRAD
        if functional is not None:
            return "inference graph" if functional.gradients is None else "joint graph"
    return "ONNX model" if target in MODEL_ENGINES else kind_of(target)


def _run_onnx(bundle: Bundle, model: OnnxModel, options: LoadOptions) -> list[VectorResult]:
    """Run the recorded calls of a program by its ONNX model."""
    program, engine, state = bundle.program(model.program), options.target, dict[str, Any]()
    plan = compose_onnx(bundle, program, model, getattr(options, engine) or runtime_of(engine), state)
    call = calling(program, lambda *args, **kwargs: plan(args, kwargs), lambda: state)
    least, results = rounding(bundle, program.name), list[VectorResult]()
    for calls in recorded(bundle, program, model):
        orders = without_orders(bundle.graph(program.name, program.forward.file), program, calls)
        result = VectorResult(program.name, calls.name, engine, [], graph="ONNX model")
        left_out = f"{', '.join(orders)} of equal values may have another order" if orders else ""
        if any(isinstance(spec, ArgumentInput) and spec.path == SEED for spec in program.inputs):
            calls.expected.values.clear()
            left_out = "the model draws other random numbers than torch"
        state.clear()
        got = attempt(functools.partial(observed, program, model, calls, call, lambda: state))
        if isinstance(got, Exception):
            results.append(replace(result, error=f"{type(got).__name__}: {first_line(got)}"))
            continue
        result = replace(
            result,
            differences=compare(calls.expected, got, least=least, eager_errors=calls.eager_errors),
            device=plan.record.device,
            ran=(EngineRun("forward", engine),),
            left_out=left_out,
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
    return replace(result, error=said)


def run_vector(
    path: Source,
    name: str,
    vector: Vector,
    stored: dict[str, torch.Tensor],
    options: LoadOptions,
    *,
    loss: bool = False,
    exact: bool = True,
) -> VectorResult:
    """Load the bundle afresh and run a recorded call with its stored tensors, the bundle's own or another.

    With `loss`, the backward pass is one from the loss alone, compared with the graph's: the record has none. With
    `exact`, graphs requested by name have to give eager's results on the machine of the export.
    """
    expected, target = recorded_observation(vector, stored), options.target

    def run() -> tuple[BundleModule, Observation, Observation, float]:
        bundle = path if isinstance(path, Bundle) else open_bundle(path, check_digests=False)
        module = load_module(bundle, replace(options, check_digests=False))
        known = observe_vector(module.twin(target="portable"), vector, stored, loss=True) if loss else expected
        got = observe_vector(module, vector, stored, loss=loss)
        return module, known, got, least_tolerance(bundle, vector.program, target, exact=exact)

    found = attempt(run)
    if isinstance(found, Exception):
        return VectorResult(vector.program, name, target, [], f"{type(found).__name__}: {found}")
    module, expected, got, least = found
    bundle = module.bundle
    engines, nbytes = module.explain_program(vector.program), sum(t.nbytes for t in module.state_tensors().values())
    del module, found
    if nbytes > _LARGE_NBYTES:
        # The module refers to itself: it and its gradients would wait for the collector, beside those of the next. A
        # second collection finds the objects that nodes of autograd refer to.
        for _ in range(2):
            gc.collect()
    if left_out := why_values_differ(bundle, vector.program, engines.device):
        expected = replace(expected, values={})
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


def record_again(
    module: BundleModule, entry: VectorEntry, make: Callable[[str], BundleModule] | None = None
) -> tuple[Vector, dict[str, torch.Tensor]]:
    """Return a recorded call with the current results of `module`, by its forward graph if that is differentiable.

    `make` makes the module to call, for an engine, where no copy of the state and no gradient of all of it shall be in
    memory; None: a copy of `module`, which is left as it is.
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
    """Run a recorded call on a loaded bundle, as `run_vector` and `observe` say; return what was observed.

    The module is left in the mode of the call, and changed as the calls change it.
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
