"""Rules of the manifest: contained paths, unique names, no dangling references."""

from __future__ import annotations

import re

from aotexport_runtime.errors import BundleInvalid
from aotexport_runtime.schema.manifest import Manifest, StateTensor, StoredPart
from aotexport_runtime.schema.versions import CALLING_CONVENTION, OLDEST_CALLING_CONVENTION
from aotexport_runtime.validate.bounds import MAX_TEXT, check_plain_name, check_span, check_text, check_unique
from aotexport_runtime.validate.containers import check_values
from aotexport_runtime.validate.modules import check_path, check_submodules
from aotexport_runtime.validate.subclasses import check_subclass, check_type_name, count_parts
from aotexport_runtime.values.trees import arrays_in

WHERE = "bundle.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATH_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}(?<!\.)")
_NAMESPACE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest with escaping paths, duplicate names or dangling references.

    Raises:
        BundleInvalid: names the fault.
    """
    if not OLDEST_CALLING_CONVENTION <= manifest.calling_convention <= CALLING_CONVENTION:
        raise BundleInvalid(
            f"calling convention {manifest.calling_convention} is not known to this runtime, which implements "
            f"{OLDEST_CALLING_CONVENTION} to {CALLING_CONVENTION}. Install the aotexport-runtime that fits, or export "
            "the model again",
            where=WHERE,
        )
    for text in (manifest.name, manifest.producer.aotexport, manifest.producer.torch):
        check_text(text, "name or version", WHERE)
    _check_files(manifest)
    _check_programs(manifest)
    _check_requirements(manifest)
    listed = {entry.path for entry in manifest.files}
    for tensor in manifest.state:
        _check_state(tensor, listed)
    _check_state_names([name for tensor in manifest.state for name in (tensor.name, *tensor.tied)])
    check_submodules(manifest, WHERE)
    _check_attributes(manifest)
    _check_vectors(manifest, listed)
    _check_onnx(manifest, listed)
    _check_ancestors(manifest)


def _check_files(manifest: Manifest) -> None:
    check_unique([entry.path for entry in manifest.files], "file", WHERE)
    for entry in manifest.files:
        check_relative_path(entry.path)
        if entry.nbytes < 0 or not _DIGEST.fullmatch(entry.sha256):
            raise BundleInvalid(f"malformed size or digest of `{entry.path}`", where=WHERE)


def check_relative_path(path: str) -> None:
    """Refuse a path that is absolute, leaves the bundle, or is not in plain form.

    Raises:
        BundleInvalid: shows the path.
    """
    parts = path.split("/")
    if len(path) > MAX_TEXT or not all(_PATH_PART.fullmatch(part) for part in parts):
        raise BundleInvalid(f"path {path[:80]!r} is not a plain relative path", where=WHERE)


def _check_programs(manifest: Manifest) -> None:
    if not manifest.programs:
        raise BundleInvalid("no programs", where=WHERE)
    check_unique([program.name for program in manifest.programs], "program", WHERE)
    for program in manifest.programs:
        check_plain_name(program.name, "program name", WHERE)
        for target in program.targets:
            check_plain_name(target, "target", WHERE)
    mains: set[str | None] = {None}
    for program in manifest.programs:
        if program.variant_of not in mains:
            raise BundleInvalid(f"program `{program.name}` is a variant of no program before it", where=WHERE)
        if program.variant_of is None:
            mains.add(program.name)


def _check_requirements(manifest: Manifest) -> None:
    required = manifest.requirements
    for name in required.tensor_types:
        check_type_name(name, WHERE)
    for name in (*required.operator_namespaces, *(part for m in required.operator_modules for part in m.split("."))):
        if not _NAMESPACE.fullmatch(name):
            raise BundleInvalid(f"operator namespace or module {name[:80]!r} is no identifier", where=WHERE)


def _check_state(tensor: StateTensor, listed: set[str]) -> None:
    subject = f"state {tensor.name[:80]!r}"
    if tensor.subclass is None:
        _check_stored(tensor, subject, listed)
    else:
        check_span(tensor.shape, tensor.stride, 0, subject, WHERE)
        check_subclass(tensor.subclass, set(), WHERE)
        if (tensor.subclass.shape, tensor.subclass.stride) != (tensor.shape, tensor.stride):
            raise BundleInvalid(f"{subject} has another shape than its structure", where=WHERE)
    if tensor.subclass is None and tensor.parts:
        raise BundleInvalid(f"{subject} is plain and has parts", where=WHERE)
    if tensor.subclass is not None and len(tensor.parts) != count_parts(tensor.subclass):
        raise BundleInvalid(f"{subject} has {len(tensor.parts)} parts for its structure", where=WHERE)
    for part in tensor.parts:
        _check_stored(part, f"{subject}, part {part.key[:80]!r}", listed)
    if tensor.requires_grad and not tensor.dtype.startswith(("float", "bfloat", "complex")):
        raise BundleInvalid(f"{subject} is {tensor.dtype} and cannot require grad", where=WHERE)


def _check_stored(tensor: StateTensor | StoredPart, subject: str, listed: set[str]) -> None:
    if tensor.file not in listed:
        raise BundleInvalid(f"{subject} is in a file that is not listed: {tensor.file[:80]!r}", where=WHERE)
    check_span(tensor.shape, tensor.stride, tensor.offset, subject, WHERE)
    if tensor.whole and (tensor.offset != 0 or not _is_contiguous(tensor)):
        raise BundleInvalid(f"{subject} is said to be whole, and is not contiguous from its first element", where=WHERE)


def _is_contiguous(tensor: StateTensor | StoredPart) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and step != expected and 0 not in tensor.shape:
            return False
        expected *= size
    return True


def _check_state_names(names: list[str]) -> None:
    check_unique(names, "state tensor", WHERE)
    modules: set[str] = set()
    for name in names:
        parts = check_path(name, "state name", WHERE)
        modules.update(".".join(parts[:count]) for count in range(1, len(parts)))
    both = modules.intersection(names)
    if both:
        raise BundleInvalid(f"{min(both)[:80]!r} is the name of a state tensor and of a module", where=WHERE)


def _check_attributes(manifest: Manifest) -> None:
    check_unique([attribute.name for attribute in manifest.attributes], "attribute", WHERE)
    for attribute in manifest.attributes:
        check_text(attribute.name, "name of an attribute", WHERE)
        check_values(attribute.value, len(manifest.state), WHERE)
        if arrays_in([attribute.value]):
            raise BundleInvalid(f"the attribute {attribute.name[:80]!r} holds an array", where=WHERE)


def _check_vectors(manifest: Manifest, listed: set[str]) -> None:
    check_unique([f"{entry.program}/{entry.name}" for entry in manifest.testvectors], "recorded call", WHERE)
    programs = {program.name for program in manifest.programs}
    for entry in manifest.testvectors:
        check_plain_name(entry.name, "recorded call", WHERE)
        if entry.program not in programs:
            raise BundleInvalid(f"a recorded call is of program {entry.program[:80]!r}, which is not here", where=WHERE)
        for path in (entry.record, entry.tensors):
            if path not in listed:
                raise BundleInvalid(f"a recorded call is in a file that is not listed: {path[:80]!r}", where=WHERE)


def _check_onnx(manifest: Manifest, listed: set[str]) -> None:
    check_unique([model.program for model in manifest.onnx], "ONNX model of program", WHERE)
    programs = {program.name for program in manifest.programs}
    state = {entry.name for entry in manifest.state}
    for model in manifest.onnx:
        if model.program not in programs:
            raise BundleInvalid(f"an ONNX model is of program {model.program[:80]!r}, which is not here", where=WHERE)
        if model.file not in listed or "/" in model.file:
            raise BundleInvalid(f"an ONNX model is no listed file at the top: {model.file[:80]!r}", where=WHERE)
        state_inputs = model.state_inputs.values()
        check_unique((*model.inputs, *state_inputs, *model.outputs), "input or output of an ONNX model", WHERE)
        check_unique(model.updates, "update of an ONNX model", WHERE)
        unknown = [name for name in model.state_inputs if name not in state]
        if unknown:
            raise BundleInvalid(f"an ONNX model takes state {unknown[0][:80]!r}, which is not here", where=WHERE)
        for name in (*model.inputs, *model.outputs, *model.updates, *state_inputs, *model.checks):
            check_text(name, "name in an ONNX model", WHERE)


def _check_ancestors(manifest: Manifest) -> None:
    for index, ancestor in enumerate(manifest.ancestors):
        for text in (ancestor.name, ancestor.path, *ancestor.changes):
            check_text(text, "name, path or change of an ancestor", WHERE)
        if not _DIGEST.fullmatch(ancestor.sha256):
            raise BundleInvalid(f"malformed digest of the ancestor {ancestor.name[:80]!r}", where=WHERE)
        if ancestor.child is not None and not 0 <= ancestor.child < index:
            raise BundleInvalid(f"the ancestor {ancestor.name[:80]!r} has a child that is not before it", where=WHERE)
