"""The whole of a call, link by link. No torch.

    bind and flatten -> guards -> choose an engine -> run it with its epilogue -> containers, state -> unflatten

An engine serves the calls that it was made for, the next one those that it does not. The last is the forward graph
under eager autograd, which is the program's meaning and serves every call that the guards admit; or an ONNX model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.engine import Engine
from aotexport_runtime.engines.runs import Engines
from aotexport_runtime.errors import CallInvalid
from aotexport_runtime.execution.source import define
from aotexport_runtime.guards.rule import GuardSource, GuardTable, Kind, Row, input_name, quick_lines
from aotexport_runtime.guards.signature import Bound, Signature, container_changes
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Constant, Leaf
from aotexport_runtime.values.tensors import NumpyTensor
from aotexport_runtime.values.trees import builder, leaves

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""`(args, kwargs) -> result of the call`."""


class Plan:
    """A program, ready to be called.

    Attributes:
        engines: what serves its calls, in the order in which they are tried; the last serves all that the guards admit.
        record: why these serve, and which passes have run.
        quick_rows: guards of the calls that the fast path serves.
    """

    def __init__(
        self,
        program: Program,
        engines: Sequence[Engine],
        record: Engines,
        guards: Sequence[Sequence[Row]],
        kinds: Sequence[Callable[[], Kind]],
        constant: Callable[[Constant], Any],
        rebinds: Sequence[tuple[int, Callable[[Any], None]]] = (),
    ) -> None:
        """Compose the chain of `program`.

        `guards` are stages of rows, see `GuardTable`; the rows of the last engine are one more. `kinds` return the
        kinds of tensors that are passed, the usual one first; `constant` the value of a constant leaf. `rebinds` are
        outputs that calls put into the module, by index, each with a function that does.
        """
        self.program = program
        self.engines = engines
        self.record = record
        changed = [change.path for change in program.container_changes]
        self._signature = Signature(program.parameters, constant, changed)
        self._change_containers = container_changes(program.container_changes, constant)
        self._rebinds = rebinds
        self._unflatten = builder(program.output_tree, constant)
        self._kinds = kinds
        self._takes_arrays = not kinds[0]().has_autograd
        stages = [*guards, engines[-1].rows]
        self.guards = GuardTable(stages, len(program.inputs))
        self.quick_rows = [*chain(*stages), *(engines[0].rows if len(engines) > 1 else ())]
        self.call = self.fast_path()
        """`__call__`, without this detour."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the program; for one that does not fit `CallInvalid` lists every violation."""
        return self.call(args, kwargs)

    def _check_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.bind(args, kwargs)
        if call.violations:
            raise CallInvalid(self.program.name, call.violations)
        return self.run(call)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Return the call with the graphs' inputs; its violations are those of guards of the program."""
        inputs: list[Any] = [None] * len(self.program.inputs)
        containers: dict[str, Any] = {}
        violations = self._signature.flatten(args, kwargs, inputs, containers)
        return Bound(inputs, {}, violations, {}) if violations else self._checked(inputs, containers)

    def bind_flat(self, values: Sequence[Any]) -> Bound:
        """Return the call with a tensor, array or integer per argument of the program."""
        given = iter(values)
        inputs = [None if isinstance(spec, StateInput) else next(given) for spec in self.program.inputs]
        return self._checked(inputs, {})

    def _checked(self, inputs: list[Any], containers: dict[str, Any]) -> Bound:
        if self._takes_arrays:
            known: dict[int, NumpyTensor] = {}
            for index, value in enumerate(inputs):
                if isinstance(value, np.ndarray):
                    inputs[index] = known.setdefault(id(value), NumpyTensor(value))
        symbols: dict[str, int] = {}
        violations = self.guards.check(inputs, symbols)
        return Bound(inputs, symbols, violations, containers)

    def run(self, call: Bound) -> Any:
        """Run the program on a call without violations; return the call's result."""
        return self._returned(self.outputs(call))

    def outputs(self, call: Bound) -> Any:
        """Run the program on a call without violations, by the first engine that serves it; return its outputs."""
        *others, engine = self.engines
        reason = ""
        for other in others:
            why_not = other.why_not(call.inputs, call.symbols)
            if why_not is None:
                engine = other
                break
            reason = why_not
        outputs = engine.run(call.inputs, call.symbols, reason)
        self._change_containers(call.containers, outputs)
        return outputs

    def _returned(self, outputs: Any) -> Any:
        """Put the tensors that the call replaces into the module; return the call's result."""
        for index, put in self._rebinds:
            put(outputs[index])
        return self._unflatten(outputs)

    # --- the fast path: a generated function that serves the calls that a program gets most often -------------
    # Invariant: a call that it serves is admitted by the explaining path as well, with the same inputs and symbols,
    # and served by the same engine.

    def fast_path(self) -> Call:
        """Return a function for every call of the program; it is the explaining path, where there is no fast one."""
        passed = {index for index, spec in enumerate(self.program.inputs) if not isinstance(spec, StateInput)}
        positional, keywords = self._signature.plain_leaves, self._signature.plain_keywords
        positional = positional if positional is not None and set(positional) == passed else None
        keywords = keywords if keywords is not None and set(keywords.values()) == passed else None
        fallback = self._check_and_run
        if positional is None and keywords is None:
            return fallback
        usual, *others = self._kinds
        made: list[Call] = []

        def otherwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not made:
                if "torch" not in sys.modules:
                    return fallback(args, kwargs)
                made.append(self._fast(others[0](), positional, keywords, fallback))
            return made[0](args, kwargs)

        return self._fast(usual(), positional, keywords, otherwise if others else fallback)

    def _fast(
        self, kind: Kind, positional: Sequence[int] | None, keywords: Mapping[str, int] | None, fallback: Call
    ) -> Call:
        """Return a function that serves calls with tensors of one kind, and gives others to the fallback."""
        engine = self.engines[0]
        for is_held in (False, True):
            source = GuardSource(kind=kind)
            lines = _bound(source, positional, keywords)
            admitted = quick_lines(source, self.quick_rows, _TURN_AWAY, is_held=is_held)
            if admitted is None:
                continue
            outputs = engine.held_expression(source) if is_held else engine.expression(source)
            if outputs is None and is_held:
                continue
            if outputs is None:
                inputs = ", ".join(map(input_name, range(len(self.program.inputs))))
                outputs = f"{source.constant(engine.run)}([{inputs}], {source.values_of(list(source.symbols))})"
            returned = self._returned if self._rebinds else self._unflatten
            lines += [*admitted, f"return {source.constant(returned)}({outputs})"]
            scope = {**source.scope, "fallback": fallback}
            fallback = define("call", "args, kwargs", lines, scope, f"{self.program.name} call")
        return fallback


def called(bundle: Bundle, names: Sequence[str], plan: Callable[[str], Plan]) -> Call:
    """Return what calls a program: its plan, or the first of its variants' that a call fits.

    Variants that were captured with one tensor in several places come first, since a call with one tensor there fits
    the others as well: the model's code may ask whether two of its arguments are one. `names` are those of the program
    and its variants, in order of preference; `plan` returns the plan of one.
    """
    if len(names) == 1:
        return plan(names[0]).call
    order = sorted(names, key=lambda name: _shared_tensors(bundle.program(name)), reverse=True)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unfit: dict[str, list[str]] = {}
        for name in order:
            fitting = plan(name)
            bound = fitting.bind(args, kwargs)
            if not bound.violations:
                return fitting.run(bound)
            unfit[name] = bound.violations
        reasons = [f"variant `{name}`: {violation}" for name in names for violation in unfit[name]]
        raise CallInvalid(names[0], reasons)

    return call


def _shared_tensors(program: Program) -> int:
    """Return how many arguments are tensors that also stand elsewhere, or the module's own."""
    indices = [leaf.index for p in program.parameters for _, leaf in leaves(p.tree) if isinstance(leaf, Leaf)]
    own = [index for index in set(indices) if isinstance(program.inputs[index], StateInput)]
    return len(indices) - len(set(indices)) + len(own)


_TURN_AWAY = "return fallback(args, kwargs)"


def _bound(source: GuardSource, positional: Sequence[int] | None, keywords: Mapping[str, int] | None) -> list[str]:
    """Return lines that bind the arguments of a call that passes all by position, or all by name; None: none does."""
    count = -1 if positional is None else len(positional)
    taken = [f"{', '.join(map(input_name, positional))}, = args"] if positional else []
    if not keywords:
        return [f"if kwargs or len(args) != {count}: {_TURN_AWAY}", *taken]
    values = ", ".join(f"kwargs[{source.constant(name)}]" for name in keywords)
    return [
        "if kwargs:",
        f"    if args or len(kwargs) != {len(keywords)}: {_TURN_AWAY}",
        f"    try: {', '.join(map(input_name, keywords.values()))}, = {values},",
        f"    except KeyError: {_TURN_AWAY}",
        f"elif len(args) != {count}: {_TURN_AWAY}",
        *(f"else: {line}" for line in taken),
    ]
