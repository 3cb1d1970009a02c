"""A loaded bundle as the source of an export: its programs and sizes, with its recorded calls as examples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.export import Dim

from aotexport.errors import ModelFileInvalid
from aotexport.model.programs import NAMED, Example, ModelSource, Program, affine, nested_sizes, scaled
from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.flat_call import arguments_of
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import CastBundle
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.schema.program import Program as ProgramRecord
from aotexport_runtime.schema.program import SizeInput
from aotexport_runtime.schema.sizes import Dimension, Size
from aotexport_runtime.schema.trees import Constant, Leaf
from aotexport_runtime.values.observe import make_inputs
from aotexport_runtime.values.sizes import describe


def source_of(module: BundleModule) -> ModelSource:
    """Return the model, example calls, programs and dynamic sizes of a loaded bundle.

    `ModelFileInvalid`: a program has no recorded example call, sizes that no option of an export describes, or was
    captured under autocast.
    """
    bundle = module.bundle
    _refuse_kept_attributes(module)
    added = variants_under_autocast(bundle)
    entries = [entry for entry in bundle.manifest.programs if entry.name not in added]
    examples = {entry.name: _example(module, entry.name) for entry in entries}
    programs = [_described(module, entry.name, examples) for entry in entries if entry.variant_of is None]
    # Programs name it where the user asks for others.
    first = next((program for program in programs if program.method == "forward"), programs[0])
    assert isinstance(first.example, Example)
    target = module if bundle.manifest.kind == "module" else _function_of(module)
    kept = tuple(bundle.manifest.requirements.operator_namespaces)
    return ModelSource(str(bundle.root), target, first.example, Path.cwd(), tuple(programs), keep_operators=kept)


def variants_under_autocast(bundle: Bundle) -> dict[str, str]:
    """Return the dtype of autocast of each variant that an export has added for calls under it, by name."""
    variants = (bundle.program(entry.name) for entry in bundle.manifest.programs if entry.variant_of is not None)
    return {program.name: program.autocast for program in variants if program.autocast is not None}


def programs_named(source: ModelSource, names: Iterable[str]) -> tuple[Program, ...]:
    """Return programs of a loaded bundle by name: its own, and others that it has the code for.

    `ModelFileInvalid`: an unknown name, or the bundle has no program of that mode.
    """
    own = {program.name: program for program in source.programs or () if isinstance(program, Program)}
    found: list[Program] = []
    for name in names:
        if name not in own and name not in NAMED:
            raise ModelFileInvalid(f"no program `{name}`; there are {', '.join(dict.fromkeys((*own, *NAMED)))}")
        wanted = own.get(name, NAMED.get(name))
        assert wanted is not None
        like = next((p for p in own.values() if (p.method, p.mode) == (wanted.method, wanted.mode)), None)
        if like is None:
            modes = ", ".join(f"`{program.name}` ({program.mode} mode)" for program in own.values())
            raise ModelFileInvalid(
                f"program `{name}` is of {wanted.mode} mode, and the bundle `{source.name}` has only {modes}: what the "
                "model does in the other mode is not in it. Export the model with both"
            )
        found.append(wanted if name in own else Program(name, wanted.mode, wanted.grad, "forward", like.example))
    return tuple(found)


def _refuse_kept_attributes(module: BundleModule) -> None:
    kept = [f"`{attribute.name}`" for attribute in module.bundle.manifest.attributes]
    if kept:
        raise ModelFileInvalid(
            f"calls of the bundle `{module.bundle.root}` change attributes of the module ({', '.join(kept)}), which a "
            "bundle made of it would not keep. Export the model"
        )


def _function_of(module: BundleModule) -> Callable[..., Any]:
    """Return a function with the name and signature of the exported one."""

    @functools.wraps(module.forward, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    function.__name__ = function.__qualname__ = module.bundle.manifest.name
    return function


def _described(module: BundleModule, name: str, examples: dict[str, Example]) -> Program:
    record, entries = module.bundle.program(name), module.bundle.manifest.programs
    return Program(
        name=name,
        mode="train" if record.mode == "train" else "eval",
        grad=record.grad,
        method=record.method,
        example=examples[name],
        variants=tuple(examples[e.name] for e in entries if e.variant_of == name and e.name in examples),
    )


# --- the example of a program ---------------------------------------------------------------------------------


_LIKE_THE_EXAMPLE = ("example", "random", "other-sizes")
"""Recorded calls to capture again with: the first one that there is."""


def _example(module: BundleModule, name: str) -> Example:
    bundle, program = module.bundle, module.bundle.program(name)
    if program.autocast is not None:
        raise ModelFileInvalid(
            f"program `{name}` of `{bundle.root}` was captured under autocast. Make the new bundle under it too: "
            f'`with torch.autocast("cpu", dtype=torch.{program.autocast}): aotexport.export(module, ...)`'
        )
    recorded = bundle.original if isinstance(bundle, CastBundle) else bundle
    entries = {entry.name: entry for entry in recorded.manifest.testvectors if entry.program == name}
    entry = next((entries[each] for each in _LIKE_THE_EXAMPLE if each in entries), None)
    if entry is None:
        raise ModelFileInvalid(
            f"program `{name}` of `{bundle.root}` has no recorded call to capture again. Pass example inputs "
            "to an export of the loaded module, `aotexport.export(module, args, output=...)`"
        )
    vector, stored = read_vector(recorded, entry)
    values = make_inputs(vector.inputs, stored, module.device, module.form).values
    args, kwargs = arguments_of(program)(values, module.state_tensors())
    args, kwargs = without_defaults(program, args, kwargs)
    return Example(args, kwargs, _dynamic_shapes(program))


def without_defaults(
    program: ProgramRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call without those that it may leave out, where Python can."""
    left_out = {parameter.name for parameter in program.parameters if parameter.optional}
    kwargs = {name: value for name, value in kwargs.items() if name not in left_out}
    places = [p for p in program.parameters if p.kind in ("positional_only", "positional_or_keyword")]
    if len(args) > len(places) or any(parameter.kind == "positional_only" for parameter in places):
        return args, kwargs
    passed: list[Any] = []
    for index, (parameter, value) in enumerate(zip(places, args, strict=True)):
        if parameter.name in left_out:
            continue
        if index == len(passed):
            passed.append(value)
        else:
            kwargs[parameter.name] = value
    return tuple(passed), kwargs


# --- its dynamic sizes ------------------------------------------------------------------------------------


def _dynamic_shapes(program: ProgramRecord) -> dict[str, Any]:
    dimensions = {each.symbol: _dimension(each) for each in program.dimensions}

    def size_of(place: Leaf | Constant) -> Any:
        if isinstance(place, Constant):
            return None
        spec = program.inputs[place.index]
        if isinstance(spec, SizeInput):
            return dimensions[spec.symbol]
        sizes = {
            axis: _made(size, dimensions, program)
            for axis, size in enumerate(spec.meta.shape)
            if not isinstance(size, int)
        }
        return sizes or None

    found: dict[str, Any] = {}
    for parameter in program.parameters:
        nested = nested_sizes(parameter.tree, size_of)
        # The signature of the loaded module names each keyword argument, and no empty `*args`.
        if parameter.kind == "var_keyword":
            found |= nested
        elif parameter.kind != "var_positional" or nested:
            found[parameter.name] = nested
    return found


def _dimension(record: Dimension) -> Any:
    # One without a name of the user's is called by its place, and an integer may be negative, which a named one is not.
    if record.name.isidentifier() and record.min is not None:
        return Dim(record.name, min=record.min, max=record.max)
    return Dim.AUTO if record.min is record.max is None else Dim.AUTO(min=record.min, max=record.max)


def _made(size: Size, dimensions: dict[str, Any], program: ProgramRecord) -> Any:
    if (linear := affine(size)) is None:
        raise ModelFileInvalid(
            f"program `{program.name}` has the size {describe(size)} among its arguments, which no dimension of "
            "`torch.export` describes. Export the model"
        )
    symbol, factor, offset = linear
    return scaled(dimensions[symbol], factor, offset)
