"""Rules of the manifest: contained paths, unique names, no dangling references."""

from __future__ import annotations

from keyword import iskeyword

from aotexport_runtime.allowed.modules import is_own_attribute
from aotexport_runtime.allowed.operators import operator_sets
from aotexport_runtime.errors import Place
from aotexport_runtime.schema.bounded import Line
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.schema.manifest import OPERATOR_SET, Manifest, OnnxModel, StateTensor, StoredPart
from aotexport_runtime.schema.program import Program, StateInput
from aotexport_runtime.schema.trees import Mapping
from aotexport_runtime.schema.versions import CALLING_CONVENTION, OLDEST_CALLING_CONVENTION
from aotexport_runtime.validate.arguments import check_form, check_span, check_unique
from aotexport_runtime.validate.declared import check_declared
from aotexport_runtime.validate.trees import check_differentiable, check_parts, subject_of
from aotexport_runtime.values.trees import keys_of

WHERE = Place("bundle.json")

MAX_PARTS = 64


def check_manifest(manifest: Manifest, where: Place = WHERE, *, limits: Limits = DEFAULT) -> None:
    """Refuse a manifest with escaping paths, duplicate names or dangling references, or files beyond the limits."""
    faults = where.found
    _check_versions(manifest, where)
    if where.found > faults or not check_declared(manifest, where):
        return
    nbytes = sum(entry.nbytes for entry in manifest.files)
    message = f"the files have {nbytes} bytes; at most {limits.bundle_nbytes} are read"
    where.expect(nbytes <= limits.bundle_nbytes, message, "bundle-limit/bytes")
    for index, name in enumerate(manifest.must_understand):
        message = f"extension `{name}` is not known to this runtime, and the bundle says that no reader may skip it"
        where.at("must_understand", index).refuse(message, "extension-unknown/extension")
    mains: set[str | None] = {None}
    for index, program in enumerate(manifest.programs):
        message = f"program `{program.name}` is a variant of no program before it"
        where.at("programs", index).expect(program.variant_of in mains, message, "reference-missing/variant")
        if program.variant_of is None:
            mains.add(program.name)
    listed = {entry.path for entry in manifest.files}
    for index, tensor in enumerate(manifest.state):
        with where.at("state", index) as here:
            _check_state(tensor, listed, here)
    with where.at("state") as here:
        _check_state_names([name for tensor in manifest.state for name in (tensor.name, *tensor.tied)], here)
    with where:
        _check_submodules(manifest, where)
    for index, model in enumerate(manifest.onnx):
        with where.at("onnx", index) as here:
            message = f"an ONNX model is no file at the top: {model.file[:80]!r}"
            here.require("/" not in model.file, message, "file-unlisted/onnx-folder")
            names = (*model.inputs, *model.state_inputs.values(), *model.outputs)
            check_unique(names, "input or output of an ONNX model", "name-twice/onnx", here)
    for index, ancestor in enumerate(manifest.ancestors):
        if ancestor.child is not None and ancestor.child >= index:
            message = f"the ancestor {ancestor.name[:80]!r} has a child that is not before it"
            where.at("ancestors", index).refuse(message, "index-range/ancestor")


def _check_versions(manifest: Manifest, where: Place) -> None:
    convention, name = manifest.calling_convention, manifest.operator_set
    if not OLDEST_CALLING_CONVENTION <= convention <= CALLING_CONVENTION:
        where.at("calling_convention").refuse(
            f"calling convention {convention} is not known to this runtime, which implements "
            f"{OLDEST_CALLING_CONVENTION} to {CALLING_CONVENTION}. Install the aotexport-runtime that fits, or export "
            "the model again",
            "convention-unknown/convention",
        )
    if name != OPERATOR_SET and name not in operator_sets():
        where.at("operator_set").refuse(
            f"operator set {name[:80]!r} is not known to this runtime, which has "
            f"{', '.join(operator_sets())}. Install a newer aotexport-runtime, or export the model again",
            "operator-set-unknown/operator-set",
        )


def _check_state(tensor: StateTensor, listed: set[str], where: Place) -> None:
    subject = subject_of(tensor)
    message = f"{subject} is in a file that is not listed: {tensor.file[:80]!r}"
    where.require(tensor.subclass is not None or tensor.file in listed, message, "file-unlisted/state")
    check_parts(tensor, set(), where)
    subjects = [subject, *(f"{subject}, part {part.key[:80]!r}" for part in tensor.parts)]
    for stored, name in zip((tensor, *tensor.parts), subjects, strict=True):
        check_span(stored, name, where)
        is_span = (stored is tensor and tensor.subclass is not None) or not stored.whole
        message = f"{name} is said to be whole, and is not contiguous from its first element"
        where.require(is_span or (stored.offset == 0 and _is_contiguous(stored)), message, "tensor-layout/whole")
    check_differentiable(tensor, subject, where)


def _is_contiguous(tensor: StoredPart) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and step != expected and 0 not in tensor.shape:
            return False
        expected *= size
    return True


def _check_state_names(names: list[str], where: Place) -> None:
    check_unique(names, "state tensor", "name-twice/state", where)
    modules: set[str] = set()
    for name in names:
        parts = _check_path(name, "state name", where)
        modules.update(".".join(parts[:count]) for count in range(1, len(parts)))
    both = min(modules.intersection(names), default="")
    where.require(
        not both, f"{both[:80]!r} is the name of a state tensor and of a module", "name-twice/state-in-module"
    )


def _check_path(path: str, subject: str, where: Place) -> list[str]:
    """Return the parts of a path of submodules."""
    check_form(path, Line, subject, "text-malformed/path", where)
    parts = path.split(".")
    is_path = len(parts) <= MAX_PARTS and all(parts) and "__dict__" not in parts
    where.require(is_path, f"{subject} {path[:80]!r} is malformed", "name-malformed/path")
    return parts


def _check_submodules(manifest: Manifest, place: Place) -> None:
    """Refuse submodules out of order, twice, or within themselves, and settings that are something else as well."""
    state = {name for entry in manifest.state for name in (entry.name, *entry.tied)}
    others = state.union(each.name for each in (*manifest.modules, *manifest.attributes))
    for name in manifest.settings:
        message = f"attribute {name[:80]!r} is listed as something else as well"
        place.at("settings", name).expect(name not in others, message, "name-twice/setting")
    ended: set[str] = set()
    around: list[str] = []
    for index, record in enumerate(manifest.modules):
        where, subject = place.at("modules", index), f"submodule {record.name[:80]!r}"
        parts = _check_path(record.name, "submodule", where) if record.name else []
        while around and around != parts[: len(around)]:
            ended.add(".".join(around))
            around.pop()
        follows = around == parts[:-1]
        where.require(follows, f"{subject} does not follow the one that it is in", "module-malformed/order")
        message = f"{record.name[:80]!r} is the name of a state tensor and of a module"
        where.require(record.name not in state, message, "name-twice/module-and-state")
        is_same = record.same_as is None or record.same_as in ended
        where.require(is_same, f"{subject} is the same as none before it", "module-malformed/same-as")
        if not isinstance(record.attributes, Mapping | None):
            raise where.invalid(f"attributes of {subject} are no mapping", "module-malformed/attributes")
        for name in (*record.absent, *(() if record.attributes is None else keys_of(record.attributes))):
            text = str(name)
            fits = name == text and text.isidentifier() and not iskeyword(text) and is_own_attribute(text)
            where.require(fits, f"{subject} has a malformed attribute {text[:40]!r}", "name-malformed/attribute")
        around = parts


def check_onnx(model: OnnxModel, program: Program, *, where: Place) -> None:
    """Refuse the record of an ONNX model that does not fit its program."""
    paths = [spec.path for spec in program.inputs if not isinstance(spec, StateInput)]
    names = {spec.name for spec in program.inputs if isinstance(spec, StateInput)}
    counts = len(paths), len(program.outputs) + len(model.updates) + len(model.checks)
    found = f"{len(model.inputs)} inputs and {len(model.outputs)} outputs"
    message = f"{found}, and program `{program.name}` has {counts[0]} and {counts[1]}"
    where.require((len(model.inputs), len(model.outputs)) == counts, message, "onnx-malformed/counts")
    for name in model.updates:
        message = f"the model changes {name[:80]!r}, which is no one input"
        where.require((name in paths) != (name in names), message, "onnx-malformed/updates")
