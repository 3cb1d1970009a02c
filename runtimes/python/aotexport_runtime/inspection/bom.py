"""A bill of materials of a bundle: CycloneDX 1.6, made by its Python library and of the manifest alone. No torch."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator
from itertools import starmap
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.inspection.diff import operator_counts
from aotexport_runtime.module.describe import describe_inputs, describe_outputs, graph_files, trust_needed
from aotexport_runtime.schema.manifest import Ancestor, Manifest

_MODEL = "bundle"


def bill_of_materials(bundle: Bundle) -> dict[str, Any]:
    """Return the document: the model with its parents, operators and calls, its files, and the packages it needs.

    What CycloneDX has no field for are properties whose names begin with `aotexport:`.
    """
    model, parts = _model(bundle), [*_files(bundle.manifest), *_packages(bundle.manifest)]
    bom = Bom(components=parts)
    bom.metadata.component = model
    bom.metadata.tools.components.add(_package("aotexport", bundle.manifest.producer.aotexport))
    bom.register_dependency(model, parts)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    # The library has no class for it.
    document["metadata"]["component"]["modelCard"] = _model_card(bundle)
    return document


def _model(bundle: Bundle) -> Any:
    manifest = bundle.manifest
    return Component(
        name=manifest.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=_MODEL,
        hashes=[_sha256(bundle.manifest_sha256)],
        pedigree=Pedigree(ancestors=starmap(_ancestor, enumerate(manifest.ancestors))) if manifest.ancestors else None,
        properties=_properties(_facts(bundle)),
    )


def _facts(bundle: Bundle) -> Iterator[tuple[str, str]]:
    manifest = bundle.manifest
    yield "format", manifest.format
    yield "min_reader", manifest.min_reader
    yield "calling_convention", str(manifest.calling_convention)
    yield "kind", manifest.kind
    yield "trust", trust_needed(bundle)
    yield "verification", manifest.verification or "not stated"
    yield "recorded_calls", str(len(manifest.testvectors))
    for entry in manifest.programs:
        yield "program", f"{entry.name}: {', '.join(entry.targets)}"
    for operator, count in sorted(_operators(bundle).items()):
        yield "operator", f"{operator}: {count}"


def _operators(bundle: Bundle) -> collections.Counter[str]:
    counts = collections.Counter[str]()
    listed = {entry.path for entry in bundle.manifest.files}
    for entry in bundle.manifest.programs:
        for file in graph_files(bundle.program(entry.name)):
            counts.update(operator_counts(bundle.graph(entry.name, file)))
        for target in entry.targets:
            if f"targets/{target}/programs/{entry.name}/lowered.json" in listed:
                has_backward = bundle.lowered(target, entry.name).backward is not None
                for backward in (False, True) if has_backward else (False,):
                    counts.update(operator_counts(bundle.lowered_graph(target, entry.name, backward=backward)))
    return counts


def _ancestor(index: int, ancestor: Ancestor) -> Any:
    """Return a parent; parents of a parent stand in the same list, and name it as their child."""
    facts = [("path", ancestor.path)] if ancestor.path else []
    facts += [] if ancestor.child is None else [("child", f"ancestor:{ancestor.child}")]
    facts += [("change", change) for change in ancestor.changes]
    return Component(
        name=ancestor.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=f"ancestor:{index}",
        hashes=[_sha256(ancestor.sha256)],
        properties=_properties(facts),
    )


def _files(manifest: Manifest) -> Iterator[Any]:
    for entry in manifest.files:
        yield Component(
            name=entry.path,
            type=ComponentType.FILE,
            bom_ref=f"file:{entry.path}",
            hashes=[_sha256(entry.sha256)],
            properties=_properties([("nbytes", str(entry.nbytes))]),
        )


def _packages(manifest: Manifest) -> Iterator[Any]:
    """Yield what a load needs: the runtime and torch as the exporter had them, and packages that the caller imports."""
    yield _package("aotexport-runtime", manifest.producer.aotexport)
    yield _package("torch", manifest.producer.torch)
    required = manifest.requirements
    classes = (name.partition(":")[0] for name in required.tensor_types)
    for module in sorted({name.partition(".")[0] for name in (*required.operator_modules, *classes)} - {"torch"}):
        yield Component(name=module, type=ComponentType.LIBRARY, bom_ref=f"module:{module}")


def _package(name: str, version: str) -> Any:
    url = PackageURL("pypi", name=name, version=version)
    return Component(name=name, version=version, type=ComponentType.LIBRARY, bom_ref=f"package:{name}", purl=url)


def _model_card(bundle: Bundle) -> dict[str, Any]:
    """Return the inputs and outputs of the first program, as `inspect` has them, and the model's name."""
    program = bundle.program(bundle.program_names[0])
    outputs = describe_outputs(program, bundle.graph(program.name, program.forward.file))
    parameters = {
        "modelArchitecture": bundle.manifest.name,
        "inputs": [{"format": line} for line in describe_inputs(program)],
        "outputs": [{"format": line} for line in outputs],
    }
    return {"modelParameters": parameters}


def _sha256(digest: str) -> Any:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)


def _properties(facts: Iterable[tuple[str, str]]) -> list[Any]:
    return [Property(name=f"aotexport:{name}", value=value) for name, value in facts]
