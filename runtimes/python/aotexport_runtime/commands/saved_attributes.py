"""Current values of attributes that calls change, for a bundle that is saved."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.manifest import ModuleAttribute, StateTensor
from aotexport_runtime.schema.program import StateInput
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import is_wrapper

FILE = "weights/attributes.safetensors"


@dataclass(frozen=True)
class SavedAttributes:
    """The manifest's records of attributes, and the file of their tensors.

    Attributes:
        known: entries of the manifest's state that stay: without those that were in attributes alone.
        found: entries of the tensors that are in attributes now; their indices follow those of `known`.
        tensors: tensors of `found`, by name; not copied.
        attributes: records of the attributes.
        stored: tensors of `FILE`, by key.
    """

    known: tuple[StateTensor, ...]
    found: tuple[StateTensor, ...]
    tensors: dict[str, torch.Tensor]
    attributes: tuple[ModuleAttribute, ...]
    stored: dict[str, torch.Tensor]


def saved_attributes(module: BundleModule) -> SavedAttributes:
    """Return the current attributes of `module`; `NotSupported`: one holds a value that a bundle cannot hold."""
    manifest = module.bundle.manifest
    if not manifest.attributes:
        return SavedAttributes(manifest.state, (), {}, (), {})
    read = _read_by_programs(module.bundle)
    known = tuple(entry for entry in manifest.state if entry.role != "constant" or entry.name in read)
    tensors = module.state_tensors()
    indices = {id(tensors[entry.name]): index for index, entry in enumerate(known)}
    found: list[tuple[str, torch.Tensor]] = []

    def index_of(tensor: torch.Tensor, path: str) -> int:
        if id(tensor) not in indices:
            _check_plain(tensor, path)
            indices[id(tensor)] = len(known) + len(found)
            found.append((path, tensor))
        return indices[id(tensor)]

    trees = module.python_state.trees(index_of)
    _check_apart(found, {entry.name: tensors[entry.name] for entry in known})
    taken = {name for entry in known for name in (entry.name, *entry.tied)}
    free = (name for index in itertools.count() if (name := f"constant.{index}") not in taken)
    names = list(itertools.islice(free, len(found)))
    # Stored tensors cannot be lazy conjugates.
    plain = [(path, tensor.resolve_conj().resolve_neg()) for path, tensor in found]
    records, stored = _store([(name, *each) for name, each in zip(names, plain, strict=True)])
    attributes = tuple(ModuleAttribute(name=name, value=tree) for name, tree in trees.items())
    tensors = {name: tensor.detach() for name, (_, tensor) in zip(names, plain, strict=True)}
    return SavedAttributes(known, tuple(records), tensors, attributes, stored)


def _read_by_programs(bundle: Bundle) -> set[str]:
    programs = [bundle.program(entry.name) for entry in bundle.manifest.programs]
    read = {spec.name for program in programs for spec in program.inputs if isinstance(spec, StateInput)}
    read |= {rebind.name for program in programs for rebind in program.rebinds}
    return read | {name for model in bundle.manifest.onnx for name in model.state_inputs}


def _check_plain(tensor: torch.Tensor, path: str) -> None:
    if is_wrapper(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        raise NotSupported(
            f"the attribute `{path}` is a `{type(tensor).__name__}` of layout {tensor.layout} on {tensor.device}, "
            "which was not there at the export, and which cannot be saved. Set it to a plain tensor or None"
        )


def _check_apart(found: list[tuple[str, torch.Tensor]], known: dict[str, torch.Tensor]) -> None:
    """Refuse attributes that share memory with the module's state, since a load would separate them."""
    spans = [(*_span(tensor), name) for name, tensor in known.items() if not is_wrapper(tensor)]
    for path, tensor in found:
        low, high = _span(tensor)
        for start, end, name in spans:
            if start < high and low < end:
                raise NotSupported(
                    f"the attribute `{path}` shares memory with `{name}`, and would not once it is saved. Set it to a "
                    "copy or None"
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last; equal: it has no elements."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _store(found: list[tuple[str, str, torch.Tensor]]) -> tuple[list[StateTensor], dict[str, torch.Tensor]]:
    """Return records and stored tensors of (name, path, tensor); overlapping tensors are stored as one span."""
    records: dict[str, StateTensor] = {}
    stored: dict[str, torch.Tensor] = {}
    for group in _overlapping(found):
        first, _, tensor = group[0]
        low, high = min(_span(t)[0] for *_, t in group), max(_span(t)[1] for *_, t in group)
        if any(other.dtype != tensor.dtype for *_, other in group):
            raise NotSupported(
                f"the attributes {', '.join(f'`{path}`' for _, path, _ in group)} share memory, as tensors of "
                "different dtypes, which cannot be saved. Set one of them to a copy or None"
            )
        # The group begins with the tensor that begins first.
        count = (high - low) // tensor.element_size()
        flat = tensor.detach().as_strided((count,), (1,)).cpu()
        stored[first] = (torch.view_as_real(flat) if flat.is_complex() else flat).clone()
        for name, _, member in group:
            records[name] = StateTensor(
                name=name,
                role="constant",
                persistent=False,
                requires_grad=member.requires_grad,
                file=FILE,
                key=first,
                dtype=dtypes.name_of(member.dtype),  # type: ignore[arg-type]
                shape=tuple(member.shape),
                stride=tuple(member.stride()),
                offset=(member.data_ptr() - low) // member.element_size() if member.numel() else 0,
                whole=False,
            )
    return [records[name] for name, _, _ in found], stored


def _overlapping(found: list[tuple[str, str, torch.Tensor]]) -> list[list[tuple[str, str, torch.Tensor]]]:
    """Return the tensors in groups that share memory, each in the order of their addresses."""
    groups: list[list[tuple[str, str, torch.Tensor]]] = []
    end = 0
    for each in sorted(found, key=lambda each: _span(each[2])):
        low, high = _span(each[2])
        if groups and low < end:
            groups[-1].append(each)
        else:
            groups.append([each])
        end = max(end, high)
    return groups
