"""Rules of the manifest: contained paths, unique names, no dangling references."""

from __future__ import annotations

import re

from aotexport_runtime.allowed.operators import operator_sets
from aotexport_runtime.errors import BundleInvalid, Place
from aotexport_runtime.schema.manifest import OPERATOR_SET, Manifest, OnnxModel, StateTensor, StoredPart
from aotexport_runtime.schema.versions import CALLING_CONVENTION, OLDEST_CALLING_CONVENTION
from aotexport_runtime.validate.bounds import MAX_TEXT, check_plain_name, check_span, check_text, check_unique
from aotexport_runtime.validate.containers import check_values
from aotexport_runtime.validate.modules import check_path, check_submodules
from aotexport_runtime.validate.subclasses import check_subclass, check_type_name, count_parts
from aotexport_runtime.values.trees import arrays_in

WHERE = "bundle.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATH_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}(?<!\.)")
_EXTENSION = re.compile(r"x-[a-z0-9]+(-[a-z0-9]+)*")
_NAMESPACE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_manifest(manifest: Manifest, where: str = WHERE) -> None:
    """Refuse a manifest with escaping paths, duplicate names or dangling references.

    Args:
        manifest: as decoded.
        where: for errors.

    Raises:
        BundleInvalid: names the fault.
    """
    where = Place(where)
    with where.at("calling_convention") as here:
        _check_convention(manifest.calling_convention, here)
    with where.at("name") as here:
        check_text(manifest.name, "name", here)
    with where.at("producer") as here:
        for text in (manifest.producer.aotexport, manifest.producer.torch):
            check_text(text, "version", here)
    _check_understood(manifest, where)
    _check_files(manifest, where)
    _check_programs(manifest, where)
    with where.at("requirements") as here:
        _check_requirements(manifest, here)
    listed = {entry.path for entry in manifest.files}
    for index, tensor in enumerate(manifest.state):
        with where.at("state", index) as here:
            _check_state(tensor, listed, here)
    with where.at("state") as here:
        _check_state_names([name for tensor in manifest.state for name in (tensor.name, *tensor.tied)], here)
    check_submodules(manifest, where)
    _check_attributes(manifest, where)
    _check_vectors(manifest, listed, where)
    _check_onnx(manifest, listed, where)
    _check_ancestors(manifest, where)


def _check_convention(convention: int, where: str) -> None:
    if not OLDEST_CALLING_CONVENTION <= convention <= CALLING_CONVENTION:
        raise BundleInvalid(
            f"calling convention {convention} is not known to this runtime, which implements "
            f"{OLDEST_CALLING_CONVENTION} to {CALLING_CONVENTION}. Install the aotexport-runtime that fits, or export "
            "the model again",
            where=where,
            code="convention-unknown",
        )


def _check_understood(manifest: Manifest, where: Place) -> None:
    """Refuse another operator set, and extensions that a reader may not skip: this one knows none."""
    with where.at("operator_set") as here:
        if manifest.operator_set != OPERATOR_SET and manifest.operator_set not in operator_sets():
            raise BundleInvalid(
                f"operator set {manifest.operator_set[:80]!r} is not known to this runtime, which has "
                f"{', '.join(operator_sets())}. Install a newer aotexport-runtime, or export the model again",
                where=here,
                code="operator-set-unknown",
            )
    with where.at("extensions") as here:
        for name in manifest.extensions:
            if len(name) > 64 or not _EXTENSION.fullmatch(name):
                raise BundleInvalid(f"extension {name[:80]!r} is not named `x-...`", where=here, code="name-malformed")
    for index, name in enumerate(manifest.must_understand):
        with where.at("must_understand", index) as here:
            if name not in manifest.extensions:
                raise BundleInvalid(f"no extension {name[:80]!r}", where=here, code="reference-missing")
            raise BundleInvalid(
                f"extension `{name}` is not known to this runtime, and the bundle says that no reader may skip it",
                where=here,
                code="extension-unknown",
            )


def _check_files(manifest: Manifest, where: Place) -> None:
    with where.at("files") as here:
        check_unique([entry.path for entry in manifest.files], "file", here)
    for index, entry in enumerate(manifest.files):
        with where.at("files", index) as here:
            check_relative_path(entry.path, here)
            if entry.nbytes < 0 or not _DIGEST.fullmatch(entry.sha256):
                raise BundleInvalid(f"malformed size or digest of `{entry.path}`", where=here, code="text-malformed")


def check_relative_path(path: str, where: str) -> None:
    """Refuse a path that is absolute, leaves the bundle, or is not in plain form.

    Raises:
        BundleInvalid: shows the path.
    """
    parts = path.split("/")
    if len(path) > MAX_TEXT or not all(_PATH_PART.fullmatch(part) for part in parts):
        raise BundleInvalid(f"path {path[:80]!r} is not a plain relative path", where=where, code="file-path")


def _check_programs(manifest: Manifest, where: Place) -> None:
    with where.at("programs") as here:
        if not manifest.programs:
            raise BundleInvalid("no programs", where=here, code="program-malformed")
        check_unique([program.name for program in manifest.programs], "program", here)
    mains: set[str | None] = {None}
    for index, program in enumerate(manifest.programs):
        with where.at("programs", index) as here:
            check_plain_name(program.name, "program name", here)
            for target in program.targets:
                check_plain_name(target, "target", here)
            if program.variant_of not in mains:
                raise BundleInvalid(
                    f"program `{program.name}` is a variant of no program before it",
                    where=here,
                    code="reference-missing",
                )
        if program.variant_of is None:
            mains.add(program.name)


def _check_requirements(manifest: Manifest, where: str) -> None:
    required = manifest.requirements
    for name in required.tensor_types:
        check_type_name(name, where)
    for name in (*required.operator_namespaces, *(part for m in required.operator_modules for part in m.split("."))):
        if not _NAMESPACE.fullmatch(name):
            raise BundleInvalid(
                f"operator namespace or module {name[:80]!r} is no identifier", where=where, code="name-malformed"
            )


def _check_state(tensor: StateTensor, listed: set[str], where: str) -> None:
    subject = f"state {tensor.name[:80]!r}"
    if tensor.subclass is None:
        _check_stored(tensor, subject, listed, where)
    else:
        check_span(tensor.shape, tensor.stride, 0, subject, where)
        check_subclass(tensor.subclass, set(), where)
        if (tensor.subclass.shape, tensor.subclass.stride) != (tensor.shape, tensor.stride):
            raise BundleInvalid(
                f"{subject} has another shape than its structure", where=where, code="structure-malformed"
            )
    if tensor.subclass is None and tensor.parts:
        raise BundleInvalid(f"{subject} is plain and has parts", where=where, code="structure-malformed")
    if tensor.subclass is not None and len(tensor.parts) != count_parts(tensor.subclass):
        raise BundleInvalid(
            f"{subject} has {len(tensor.parts)} parts for its structure", where=where, code="structure-malformed"
        )
    for part in tensor.parts:
        _check_stored(part, f"{subject}, part {part.key[:80]!r}", listed, where)
    if tensor.requires_grad and not tensor.dtype.startswith(("float", "bfloat", "complex")):
        raise BundleInvalid(
            f"{subject} is {tensor.dtype} and cannot require grad", where=where, code="structure-malformed"
        )


def _check_stored(tensor: StateTensor | StoredPart, subject: str, listed: set[str], where: str) -> None:
    if tensor.file not in listed:
        raise BundleInvalid(
            f"{subject} is in a file that is not listed: {tensor.file[:80]!r}", where=where, code="file-unlisted"
        )
    check_span(tensor.shape, tensor.stride, tensor.offset, subject, where)
    if tensor.whole and (tensor.offset != 0 or not _is_contiguous(tensor)):
        raise BundleInvalid(
            f"{subject} is said to be whole, and is not contiguous from its first element",
            where=where,
            code="tensor-layout",
        )


def _is_contiguous(tensor: StateTensor | StoredPart) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and step != expected and 0 not in tensor.shape:
            return False
        expected *= size
    return True


def _check_state_names(names: list[str], where: str) -> None:
    check_unique(names, "state tensor", where)
    modules: set[str] = set()
    for name in names:
        parts = check_path(name, "state name", where)
        modules.update(".".join(parts[:count]) for count in range(1, len(parts)))
    both = modules.intersection(names)
    if both:
        raise BundleInvalid(
            f"{min(both)[:80]!r} is the name of a state tensor and of a module", where=where, code="name-twice"
        )


def _check_attributes(manifest: Manifest, where: Place) -> None:
    with where.at("attributes") as here:
        check_unique([attribute.name for attribute in manifest.attributes], "attribute", here)
    for index, attribute in enumerate(manifest.attributes):
        with where.at("attributes", index) as here:
            check_text(attribute.name, "name of an attribute", here)
            check_values(attribute.value, len(manifest.state), here)
            if arrays_in([attribute.value]):
                raise BundleInvalid(
                    f"the attribute {attribute.name[:80]!r} holds an array", where=here, code="structure-malformed"
                )


def _check_vectors(manifest: Manifest, listed: set[str], where: Place) -> None:
    programs = {program.name for program in manifest.programs}
    with where.at("testvectors") as here:
        check_unique([f"{entry.program}/{entry.name}" for entry in manifest.testvectors], "recorded call", here)
    for index, entry in enumerate(manifest.testvectors):
        with where.at("testvectors", index) as here:
            check_plain_name(entry.name, "recorded call", here)
            if entry.program not in programs:
                raise BundleInvalid(
                    f"a recorded call is of program {entry.program[:80]!r}, which is not here",
                    where=here,
                    code="reference-missing",
                )
            for path in (entry.record, entry.tensors):
                if path not in listed:
                    raise BundleInvalid(
                        f"a recorded call is in a file that is not listed: {path[:80]!r}",
                        where=here,
                        code="file-unlisted",
                    )


def _check_onnx(manifest: Manifest, listed: set[str], where: Place) -> None:
    with where.at("onnx") as here:
        check_unique([model.program for model in manifest.onnx], "ONNX model of program", here)
    programs = {program.name for program in manifest.programs}
    state = {entry.name for entry in manifest.state}
    for index, model in enumerate(manifest.onnx):
        with where.at("onnx", index) as here:
            _check_model(model, programs, state, listed, here)


def _check_model(model: OnnxModel, programs: set[str], state: set[str], listed: set[str], where: str) -> None:
    if model.program not in programs:
        raise BundleInvalid(
            f"an ONNX model is of program {model.program[:80]!r}, which is not here",
            where=where,
            code="reference-missing",
        )
    if model.file not in listed or "/" in model.file:
        raise BundleInvalid(
            f"an ONNX model is no listed file at the top: {model.file[:80]!r}", where=where, code="file-unlisted"
        )
    state_inputs = model.state_inputs.values()
    check_unique((*model.inputs, *state_inputs, *model.outputs), "input or output of an ONNX model", where)
    check_unique(model.updates, "update of an ONNX model", where)
    unknown = [name for name in model.state_inputs if name not in state]
    if unknown:
        raise BundleInvalid(
            f"an ONNX model takes state {unknown[0][:80]!r}, which is not here",
            where=where,
            code="reference-missing",
        )
    for name in (*model.inputs, *model.outputs, *model.updates, *state_inputs, *model.checks):
        check_text(name, "name in an ONNX model", where)


def _check_ancestors(manifest: Manifest, where: Place) -> None:
    for index, ancestor in enumerate(manifest.ancestors):
        with where.at("ancestors", index) as here:
            for text in (ancestor.name, ancestor.path, *ancestor.changes):
                check_text(text, "name, path or change of an ancestor", here)
            if not _DIGEST.fullmatch(ancestor.sha256):
                raise BundleInvalid(
                    f"malformed digest of the ancestor {ancestor.name[:80]!r}", where=here, code="text-malformed"
                )
            if ancestor.child is not None and not 0 <= ancestor.child < index:
                raise BundleInvalid(
                    f"the ancestor {ancestor.name[:80]!r} has a child that is not before it",
                    where=here,
                    code="index-range",
                )
