"""The program of a loaded bundle that a call runs, with the engines that serve it, ready to be called."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.plan import Call, Plan
from aotexport_runtime.engines.candidates import AUTOGRAD, CUDA, PORTABLE, Request
from aotexport_runtime.engines.engine import Engine, Native
from aotexport_runtime.engines.forward.engine import ForwardEngine
from aotexport_runtime.engines.functional.engine import FunctionalEngine
from aotexport_runtime.engines.runs import Engines
from aotexport_runtime.engines.select import Choice, select_engine, sizes_of
from aotexport_runtime.errors import ArgumentInvalid, NotSupported, listed
from aotexport_runtime.execution.allocator import give_back_freed_memory
from aotexport_runtime.execution.autocast import device_type_of
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.execution.matmul.sizes import Matmul
from aotexport_runtime.guards.arguments import argument_rows
from aotexport_runtime.guards.caller import mode_rows, records_gradients, state_rows
from aotexport_runtime.guards.rule import Row, torch_tensors
from aotexport_runtime.module.state import BundleState
from aotexport_runtime.rewrite.names import random_nodes
from aotexport_runtime.schema.program import Program, SizeInput, StateInput
from aotexport_runtime.submodules.adapter import adapters_below
from aotexport_runtime.submodules.tables import StateSlot, former_kind, is_sharded, module_at, put_quietly
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import is_wrapper

if TYPE_CHECKING:
    from aotexport_runtime.engines.forward.live_graph import LiveGraph

log = logging.getLogger("aotexport_runtime")

_MEASURES = "AOTEXPORT_MEASURE"
"""Environment variable: 0: no load measures engines; 1: every one does; else those of frozen weights do."""

_UNREAD: StateSlot = ({"": torch.empty(0)}, "")
"""Slot of a state tensor that no node reads."""


def compose(
    module: BundleState,
    program: Program,
    *,
    measures: bool = True,
    added: Mapping[str, StateSlot] = MappingProxyType({}),
) -> Plan:
    """Return a program of a loaded bundle, ready to be called; `measures`: whether engines may be measured.

    `added` are slots of state that the program reads, and that the bundle does not have.

    Raises:
        NotSupported: the requested native code does not run the program, or calls cannot follow a changed submodule.
    """
    bundle, environment, request, live = (
        module.bundle,
        module._environment,
        module._request,
        _live(module, program, added),
    )
    if module._untold is not None and not added:
        request = dataclasses.replace(request, target=AUTOGRAD)
    device_type = device_type_of(program, environment.device)
    measures = measures and live is None and _is_measured(bundle, program, request, device_type)
    choice, native = _selected(module, program, request, live, is_measured=measures)
    device = str(environment.device or device_type)
    record = Engines(program.name, device, choice.engines, choice.why_not, (), because=choice.because)
    record.demand(request.target)
    if choice.engines == (AUTOGRAD,) and request.target != AUTOGRAD and (live or program.functional):
        log.info("program %s runs its forward graph: %s", program.name, choice.why_not[PORTABLE])
    forward = ForwardEngine(bundle, program, environment, record, live)
    graph, engines = None, list[Engine]([forward])
    if PORTABLE in choice.engines or measures:
        graph = FunctionalEngine(bundle, program, environment, record, forward)
    if graph is not None and PORTABLE in choice.engines:
        engines = [*([] if native is None else [graph.by_native(native)]), graph, forward]
    plan = functools.partial(
        Plan,
        program,
        record=record,
        guards=_guards(module, program, live, added),
        kinds=[torch_tensors],
        constant=lambda leaf: constant_value(leaf.value, environment),
        rebinds=[
            (rebind.output_index, functools.partial(put_quietly, *module._slot(rebind.name)))
            for rebind in program.rebinds
        ],
    )
    if graph is None or not measures:
        return plan(engines)
    from aotexport_runtime.module.measured import fastest

    first = fastest(module, plan(engines), graph)
    give_back_freed_memory()  # Engines that are not chosen held copies of the weights.
    return compose(module, program, measures=False, added=added) if first is None else plan(first)


def _is_measured(bundle: Bundle, program: Program, request: Request, device_type: str) -> bool:
    """Return whether engines of a program are to be measured: somebody wants it, and a call changes nothing."""
    asked = os.environ.get(_MEASURES)
    functional = program.functional
    if request.target != "auto" or not (request.frozen if asked is None or request.precision else asked != "0"):
        return False
    if program.grad or functional is None or functional.gradients is not None or device_type != "cpu":
        return False
    if functional.mutations or functional.version_rises or program.rebinds or program.container_changes:
        return False
    if functional.grad_mode is not None or random_nodes(bundle.graph(program.name, program.forward.file)):
        return False
    return any(entry.program == program.name for entry in bundle.manifest.testvectors)


def _selected(
    module: BundleState, program: Program, request: Request, live: LiveGraph | None, *, is_measured: bool
) -> tuple[Choice, Native | None]:
    """Return the engines of a program and the native code among them; code that cannot be loaded is passed over."""
    bundle, environment = module.bundle, module._environment
    device = None if environment.device is None else environment.device.type
    failed: dict[str, str] = {}
    while True:
        choice = select_engine(
            bundle,
            program,
            request,
            targets=module._targets,
            device=device,
            changed="" if live is None else ", ".join(live.reasons),
            failed=failed,
            is_measured=is_measured,
            prefers_onednn=functools.partial(_prefers_onednn, environment),
        )
        if choice.native is None:
            return choice, None
        try:
            if choice.native == CUDA:
                assert environment.lowering is not None
                return choice, environment.lowering(bundle, program, environment)
            from aotexport_runtime.engines.cpu.engine import Libraries

            return choice, Libraries(bundle, choice.native, program, environment)
        except NotSupported as error:
            failed[choice.native] = str(error)
            if choice.native == CUDA:
                log.info("program %s runs without its kernels: %s", program.name, error)
            else:
                log.warning("program %s runs its graph, and not target %s: %s", program.name, choice.native, error)


def _guards(
    module: BundleState, program: Program, live: LiveGraph | None, added: Mapping[str, StateSlot]
) -> list[list[Row]]:
    """Return the guards of a program that tensors of torch are passed to, in stages."""
    environment = module._environment

    def slot(name: str) -> StateSlot:
        return added.get(name) or module._slot(name)

    forms = {
        index: environment.form(spec.subclass)
        for index, spec in enumerate(program.inputs)
        if not isinstance(spec, SizeInput) and spec.subclass is not None
    }
    reads = _reads(program, live)
    specs = [(index, spec.name) for index, spec in enumerate(program.inputs) if isinstance(spec, StateInput)]
    used = {name for index, name in specs if index in reads}
    ties = [
        (slot(entry.name), [slot(name) for name in entry.tied], entry)
        for entry in module.bundle.manifest.state
        if entry.tied and entry.name in used and entry.role != "constant"
    ]
    state = [(index, *(slot(name) if index in reads else _UNREAD)) for index, name in specs]
    devices = () if environment.device is None else (environment.device.type,)
    of_modes = mode_rows(program, device_type_of(program, environment.device))
    forms_read = {index: form for index, form in forms.items() if index in reads}
    of_state = state_rows(program, state, ties, forms_read, () if live is None else live.added)
    return [[*argument_rows(program, devices, forms), *of_modes], of_state]


def _reads(program: Program, live: LiveGraph | None) -> set[int]:
    """Return the inputs that the program itself reads; changed submodules read their own state."""
    if live is None:
        return set(range(len(program.inputs)))
    asked = {index for question in program.questions for index in question.inputs}
    return asked | {i for i, value in enumerate(live.graph.inputs) if value.name in live.reads}


def _live(module: BundleState, program: Program, added: Mapping[str, StateSlot]) -> LiveGraph | None:
    """Return the forward graph with adapters and submodules that changed, or all; None: as it was captured."""
    changes, untold, live = module.changes(), None if added else module._untold, None
    adapters = [(path, adapter) for path, adapter in adapters_below(module) if adapter.is_needed()]
    if changes or adapters or untold is not None:
        from aotexport_runtime.engines.forward.live_graph import graph_of_calls, live_graph

        graph = module.bundle.graph(program.name, program.forward.file)
        # Constants are in no table of a submodule.
        names = {e.name: () if e.role == "constant" else (e.name, *e.tied) for e in module.bundle.manifest.state}
        make = functools.partial(
            live_graph, graph, program, adapters=adapters, names=names, environment=module._environment
        )
        if untold is None:
            live = make(changes)
        else:
            live, paths = graph_of_calls(module, graph, changes, make)
            untold.update(paths)
            called = {graph.modules[call.module] for call in graph.calls if call.begin < call.end}
            if module._hooked and (unseen := sorted(paths & called if graph.calls else paths)):
                names = listed([f"`{path}`" for path in unseen])
                log.warning("hooks of all modules do not see the calls of %s in program %s", names, program.name)
    _check_state_read(program, live, lambda name: added.get(name) or module._slot(name))
    return live


def program_of(method: str, methods: Mapping[str, Sequence[Program]], *, training: bool) -> str:
    """Return the name of the program that a call of `method` runs now; `NotSupported`: there is none for this mode."""
    programs = methods.get(method, [])
    if not programs:
        raise NotSupported(
            f"the bundle has no program of `{method}`, only of {', '.join(f'`{name}`' for name in methods)}"
        )
    mode = "train" if training else "eval"
    fitting = [program for program in programs if program.mode in (mode, "function")]
    if not fitting:
        names = ", ".join(f"`{program.name}` ({program.mode} mode)" for program in programs)
        raise NotSupported(
            f"the module is in {mode} mode, and the bundle has only {names}. Call "
            f"`.{'eval' if training else 'train'}()` first, or export a program for {mode} mode"
        )
    grad = records_gradients()
    return next((program.name for program in fitting if program.grad == grad), fitting[0].name)


def _prefers_onednn(environment: Environment, matmul: Matmul) -> bool:
    if environment.place("cpu").type != "cpu":
        return False
    from aotexport_runtime.execution.matmul.onednn import would_prefer_onednn

    return would_prefer_onednn(matmul, sizes_of(matmul), environment.matmul)


def _check_state_read(program: Program, live: LiveGraph | None, slot: Callable[[str], StateSlot]) -> None:
    """Refuse state that was replaced by such of another dtype or shape, and that no changed submodule alone reads."""
    for index, spec in enumerate(program.inputs):
        if not isinstance(spec, StateInput) or spec.subclass is not None:
            continue
        if live is not None and live.graph.inputs[index].name not in live.reads:
            continue
        table, key = slot(spec.name)
        if former_kind(table, key) is None:
            continue
        tensor = table[key]
        if is_wrapper(tensor) and not is_sharded(table):
            raise NotSupported(
                f"`{spec.name}` is a `{type(tensor).__name__}` now, and program `{program.name}` was captured with a "
                "plain tensor, which it reads otherwise than by calling a layer. Change the model, and export it again"
            )
        if (dtypes.name_of(tensor.dtype), tuple(tensor.shape)) == (spec.meta.dtype, spec.meta.shape):
            continue
        raise NotSupported(
            f"`{spec.name}` is {dtypes.name_of(tensor.dtype)}{list(tensor.shape)} now, and program "
            f"`{program.name}` was captured with {spec.meta.dtype}{list(spec.meta.shape)}. Put one of that dtype and "
            "shape in its place, replace the whole submodule that reads it, or change the model and export it again"
        )


# --- taps: results of submodules beside a call's own result, by forward hooks on the submodules -----------------

_FOUND: ContextVar[dict[str, list[Any]] | None] = ContextVar("found", default=None)
"""Results of submodules in the call that runs, by path; None: no call with taps runs."""


def _keep(path: str, module: nn.Module, args: Any, result: Any) -> None:
    """Keep the result of a submodule while a call with taps runs: a forward hook."""
    found = _FOUND.get()
    if found is not None:
        found.setdefault(path, []).append(result)


def add_taps(module: nn.Module, bundle: Bundle, paths: Sequence[str]) -> None:
    """Keep the results of the submodules at `paths` in every call with taps.

    Raises:
        ArgumentInvalid: there is no such submodule.
        NotSupported: no program tells which of its nodes are calls of it.
    """
    if not paths:
        return
    from aotexport_runtime.engines.forward.live_graph import UNUSED
    from aotexport_runtime.engines.forward.submodule_call import without_values

    known = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    first = {record.name: record.same_as or record.name for record in bundle.manifest.modules}
    graphs = [bundle.graph(name, bundle.program(name).forward.file) for name in bundle.program_names]
    calls: dict[str, str | None] = {}
    for graph in graphs:
        for call in graph.calls:
            # One program that tells is enough: others refuse their calls.
            if calls.get(name := graph.modules[call.module], "") is not None:
                calls[name] = call.refusal or (UNUSED if without_values(call, returned=True) else None)
    for path in paths:
        submodule = module_at(module, path) if path in known else None
        if submodule is None:
            near = ", ".join(f"`{name}`" for name in difflib.get_close_matches(path, known))
            raise ArgumentInvalid(f"`taps`: no submodule `{path}`" + (f"; there are {near}" if near else ""))
        why_not = calls.get(
            first.get(path, path),
            "the model's code does not call it, or was exported with `--strip`, or not by a direct trace",
        )
        if why_not is not None:
            raise NotSupported(f"`taps`: the bundle does not tell what calls of `{path}` return: {why_not}")
        submodule.register_forward_hook(functools.partial(_keep, path))


def tapped(run: Call, paths: Sequence[str]) -> Call:
    """Return a function that calls a program, and returns its result beside those of the submodules at `paths`."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found: dict[str, list[Any]] = {}
        token = _FOUND.set(found)
        try:
            result = run(args, kwargs)
        finally:
            _FOUND.reset(token)
        return result, {p: found[p] if len(found[p]) > 1 else found[p][0] for p in paths if p in found}

    return call
