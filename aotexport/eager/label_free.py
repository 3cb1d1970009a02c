"""Calls without labels: the variant of an inference program without the arguments that only a loss needs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from aotexport.eager.run import Run, eager_run, shorter_call
from aotexport.errors import ExportFailed
from aotexport.model.call import ExampleCall, example_call, signature_of
from aotexport.model.programs import ProgramSpec
from aotexport.model.refusals import attempt
from aotexport.model.source_lines import described
from aotexport.model.state import State
from aotexport.model.structure import flattened
from aotexport_runtime.schema.trees import Leaf, Tree
from aotexport_runtime.values.trees import leaves

_USUAL_NAMES = ("label", "target")
"""Parts of the names of arguments that users expect to leave out."""

Results = tuple[Tree, list[int]]
"""Structure of a call's result, and the number of axes of each of its tensors."""


def with_label_free(specs: Iterable[ProgramSpec], state: State) -> tuple[list[ProgramSpec], dict[str, list[str]]]:
    """Return the programs to capture, adding a variant without labels per program without gradients.

    Labels are arguments with the default None for which the example passes tensors, and without which the model returns
    another structure: no loss, or logits alone. A mask is none if the structure stays. The variant leaves out all
    labels together; a program of which another variant passes none already gets none. Also returned are sentences for
    the user about labels that no call may leave out, by the name of the program.
    """
    found, notes = list(specs), dict[str, list[str]]()
    for spec in list(found):
        if spec.grad or spec.mode == "train" or spec.variant_of is not None:
            continue
        variants = [other for other in found if other.variant_of == spec.name]
        if not _passed(spec.call):
            continue
        with eager_run(spec.call, state, spec.mode, grad=spec.grad, outside=True) as run:
            labels = _labels(spec, run, notes.setdefault(spec.name, []))
        if not labels or any(not _passed(other.call) & set(labels) for other in variants):
            continue
        name = f"{spec.name}.{len(variants) + 2}"
        last = max(found.index(other) for other in (spec, *variants))
        free = replace(spec, name=name, call=_without(spec.call, labels), variant_of=spec.name, without=tuple(labels))
        found.insert(last + 1, free)
    return found, notes


def _labels(spec: ProgramSpec, run: Run, notes: list[str]) -> list[str]:
    """Return the names of the labels; add to `notes` why an argument with a label's usual name cannot be left out."""
    optional = sorted(_passed(spec.call), key=[parameter.name for parameter in spec.call.parameters].index)
    try:
        whole = _results(run, spec.call)
    except ExportFailed:
        # The capture will report why the model does not run.
        return []
    labels, needed = list[str](), dict[str, ExportFailed]()
    for name in optional:
        try:
            if _results(run, _without(spec.call, [name])) != whole:
                labels.append(name)
        except ExportFailed as error:
            needed[name] = error
    for pair in itertools.combinations(needed, 2):
        # The model may need both of a pair or none, such as begin and end of an answer.
        with contextlib.suppress(ExportFailed):
            if _results(run, _without(spec.call, pair)) != whole:
                labels += pair
    labels = [name for name in optional if name in labels]
    for name in needed:
        if name not in labels and any(word in name for word in _USUAL_NAMES):
            notes.append(f"calls of program `{spec.name}` must pass `{name}`: {_why(needed[name])}")
    if len(labels) > 1:
        try:
            _results(run, _without(spec.call, labels))
        except ExportFailed as error:
            names = ", ".join(f"`{name}`" for name in labels)
            notes.append(f"calls of program `{spec.name}` must pass one of {names}: {_why(error)}")
            return []
    return labels


def _why(error: ExportFailed) -> str:
    return f"without, the model fails: {described(error.error)}"


def _passed(call: ExampleCall) -> set[str]:
    """Return the arguments whose default is None, and for which the example passes tensors."""
    parameters = signature_of(call.callable).parameters
    return {
        own.name
        for own in call.parameters
        if own.kind in ("positional_only", "positional_or_keyword", "keyword_only")
        and parameters[own.name].default is None
        and any(
            isinstance(leaf, Leaf) and isinstance(call.tensors[leaf.index], torch.Tensor)
            for _, leaf in leaves(own.tree)
        )
    }


def _without(call: ExampleCall, names: Collection[str]) -> ExampleCall:
    positional = [p.name for p in call.parameters if p.kind in ("positional_only", "positional_or_keyword")]
    args = [None if name in names else arg for name, arg in zip(positional, call.args, strict=False)]
    kwargs = {name: value for name, value in call.kwargs.items() if name not in names}
    sizes = {name: spec for name, spec in call.dynamic_shapes.items() if name not in names}
    return example_call(call.callable, (*args, *call.args[len(args) :]), kwargs, sizes)


def _results(run: Run, call: ExampleCall) -> Results:
    shorter = shorter_call(call)
    if shorter is not None:
        with contextlib.suppress(ExportFailed):
            return _results(run, shorter)
    with attempt("call without labels"):
        run.begin()
        tree, values = flattened(run(call), "output", role="output")
        return tree, [value.dim() if isinstance(value, torch.Tensor) else 0 for value in values]
