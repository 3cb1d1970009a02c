"""The bundles that a model was loaded from, and what was changed in them: ancestors of the next bundle."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

import msgspec
from torch import nn

from aotexport.model.call import ExampleCall
from aotexport.values.same_tensors import have_same_values
from aotexport_runtime.bundle.weights import load_tensors
from aotexport_runtime.errors import NotSupported, first_line, listed
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import CastBundle
from aotexport_runtime.schema.bounded import MAX_TEXT
from aotexport_runtime.schema.manifest import Ancestor
from aotexport_runtime.schema.program import Program
from aotexport_runtime.submodules.adapter import adapters_below


def ancestors_of(call: ExampleCall, programs: Iterable[Program]) -> tuple[Ancestor, ...]:
    """Return the loaded bundles that an export of these programs is made of, each followed by its own ancestors."""
    programs, found = [*programs], list[Ancestor]()
    for path, loaded in loaded_in(call):
        changes = tuple(change[:MAX_TEXT] for change in _changes(loaded, () if path else programs))
        first = len(found)
        name, digest = loaded.bundle.manifest.name, loaded.bundle.manifest_sha256
        found.append(Ancestor(name=name, sha256=digest, path=path, changes=changes))
        for older in loaded.bundle.manifest.ancestors:
            child = first if older.child is None else first + 1 + older.child
            found.append(msgspec.structs.replace(older, child=child))
    return tuple(found)


def loaded_in(call: ExampleCall) -> Iterator[tuple[str, BundleModule]]:
    """Yield the loaded bundles that a call runs, with their paths in the module."""
    module = call.module or getattr(inspect.unwrap(call.callable), "__self__", None)
    if isinstance(module, nn.Module):
        yield from ((path, child) for path, child in module.named_modules() if isinstance(child, BundleModule))


def _changes(module: BundleModule, programs: Iterable[Program]) -> Iterator[str]:
    """Yield a phrase per change since the load, and in it."""
    if isinstance(module.bundle, CastBundle):
        yield f"loaded in {module.bundle.dtype}"
    try:
        yield from (f"`{change.path}` {change.how}" for change in module.changes())
    except NotSupported as error:
        yield first_line(error)
    entries = {entry.name: entry for entry in module.bundle.manifest.state}
    tensors = {name: tensor for name, tensor in module.present_tensors().items() if entries[name].role == "parameter"}
    frozen = [name for name, tensor in tensors.items() if entries[name].requires_grad and not tensor.requires_grad]
    thawed = [name for name, tensor in tensors.items() if tensor.requires_grad and not entries[name].requires_grad]
    adapted = [f"{path}.{adapter.tensor}" for path, adapter in adapters_below(module)]
    other = _with_other_values(module)
    found = {"adapters on": adapted, "frozen:": frozen, "no longer frozen:": thawed, "other values:": other}
    yield from (f"{what} {listed([f'`{name}`' for name in names])}" for what, names in found.items() if names)
    records, before = [*programs], [*module.bundle.program_names]
    names = [record.name for record in records]
    if names and names != before:
        yield f"programs {', '.join(names)} instead of {', '.join(before)}"
    alike = [(record, module.bundle.program(record.name)) for record in records if record.name in before]
    sizes = [(_sizes(record), _sizes(own)) for record, own in alike]
    yield from dict.fromkeys(f"sizes {now} instead of {then}" for now, then in sizes if now != then)


def _sizes(program: Program) -> str:
    sizes = (
        f"`{size.name}` from {size.min}" + ("" if size.max is None else f" to {size.max}")
        for size in program.dimensions
    )
    return ", ".join(sizes) or "that are fixed"


def _with_other_values(module: BundleModule) -> list[str]:
    """Return the names of the state tensors whose values are not those of the bundle."""
    bundle = module.bundle
    is_cast = isinstance(bundle, CastBundle)
    stored = bundle.load_state(module.form) if is_cast else load_tensors(bundle, bundle.manifest.state, module.form)
    return [name for name, tensor in module.present_tensors().items() if not have_same_values(tensor, stored[name])]
