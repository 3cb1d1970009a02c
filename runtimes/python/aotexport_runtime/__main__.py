"""`python -m aotexport_runtime COMMAND bundle/`, for containers without the exporter; `--help` lists the commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from aotexport_runtime.errors import (
    AotExportError,
    ArgumentInvalid,
    DataInvalid,
    NotSupported,
    OutputExists,
    coded,
    printable,
)
from aotexport_runtime.server.options import add_options, options_of
from aotexport_runtime.values.arguments import check_torch, class_named, imported, places_of


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit code: 0 well, 1 the bundle failed, 2 wrong usage."""
    given = sys.argv[1:] if argv is None else argv
    try:
        if given[:1] == ["finetune"]:
            return _finetune(given[1:])
        options = parser().parse_args(given)
        return options.run(options)
    except AotExportError as error:
        print(f"error: {coded(error)}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentInvalid | DataInvalid | OutputExists) else 1


def parser() -> argparse.ArgumentParser:
    """Return the commands and their options."""
    told = argparse.ArgumentParser(prog="python -m aotexport_runtime", description=__doc__)
    commands = told.add_subparsers(required=True)

    def command(name: str, run: Callable[[Any], int], text: str) -> Callable[..., Any]:
        added = commands.add_parser(name, help=text)
        added.set_defaults(run=run)
        return added.add_argument

    add = command("inspect", _inspect, "show what a bundle is; needs no torch")
    add("bundle")
    add("--program", help="show one program")
    add("--graph", action="store_true", help="show the graphs")
    add("--json", action="store_true", help="print JSON")
    add = command("check", _check, "list every fault of a bundle, with its code and JSON path; runs nothing")
    add("bundle")
    add("--json", action="store_true", help="print JSON")
    add = command("doctor", _doctor, "say what this machine has for bundles, and how it would run one")
    add("bundle", nargs="?", help="whose needs and engines are told as well")
    add = command("selftest", _selftest, "compare a bundle with the recorded results of eager execution")
    add("bundle", nargs="+")
    add("--device", help="where to run, for example cuda")
    add("--target", action="append", help="engine to test alone (repeatable; default: all of the bundle)")
    add("--trust", choices=("data", "native"), default="data", help="native: run native files as well")
    _add_custom(add)
    add("--sandbox", action="store_true", help="first give up writing, network, programs (Linux)")
    add("--mapped", action="store_true", help="map weights; nobody may write into the files meanwhile")
    add("--json", action="store_true", help="print JSON")
    add = command("report", _report, "write a page about a bundle: memory, time, weights; needs the extra `report`")
    add("bundle")
    add("-o", "--output", default="report.html", metavar="FILE", help="file to write (default: %(default)s)")
    add("--no-measure", action="store_true", help="do not run the recorded calls")
    _add_custom(add)
    # Its options are click's; see `main`.
    commands.add_parser("finetune", help="train a bundle on data of your own; needs the extra `finetune`")
    add = command("explain", _explain, "explain an error: its cause, and the way out")
    add("name", metavar="CODE", help="what stands in brackets behind an error, or the class of one")
    add = command("pull", _pull, "write the bundle of a repository, or of an OCI image layout, to a directory, checked")
    add("address", metavar="hf://OWNER/NAME[@REVISION]|oci:DIRECTORY[:TAG]")
    add("-o", "--output", required=True, metavar="BUNDLE", help="directory to write")
    add("--force", action="store_true", help="replace a bundle at the output")
    command("serve", _serve, "serve a directory of bundles by the Open Inference Protocol")
    add_options(commands.choices["serve"])
    add = command("triton-config", _triton_config, "print the config.pbtxt of a bundle for Triton's Python backend")
    add("bundle")
    add("--name", help="of the model in Triton's repository (default: the directory's)")
    add("--max-batch-size", type=int, default=32, help="greatest joined batch (default: %(default)s)")
    add = command("verify-signature", _verify_signature, "verify who signed a bundle, and every file; needs no torch")
    add("bundle")
    add("--public-key", metavar="FILE", help="key of the signer")
    add("--certificate", dest="certificate_chain", action="append", default=[], metavar="FILE", help="of an authority")
    add("--identity", metavar="NAME", help="identity of the signer at --issuer")
    add("--issuer", metavar="URL", help="OpenID provider")
    add("--trust-config", metavar="FILE", help="trust of a Sigstore of one's own")
    add("--signature", metavar="FILE", help="the signature (default: model.sig in the bundle)")
    add("--at", metavar="TIME", help="when certificates must be valid (default: now), for archives")
    return told


def _add_custom(add: Callable[..., Any]) -> None:
    """Add the options for bundles with custom operators."""
    add("--import", dest="imports", action="append", default=[], metavar="MODULE")
    add("--operator-namespace", action="append", default=[], metavar="NAME")
    add("--tensor-type", action="append", default=[], metavar="MODULE:NAME", help="class of tensors")


def _inspect(options: Any) -> int:
    from aotexport_runtime.bundle.read import open_bundle
    from aotexport_runtime.module.describe import describe, summary

    bundle = open_bundle(options.bundle)
    if options.json:
        print(json.dumps(summary(bundle, program=options.program, graph=options.graph), indent=2))
    else:
        print(printable(describe(bundle, program=options.program, graph=options.graph)))
    return 0


def _check(options: Any) -> int:
    from aotexport_runtime.bundle.check import faults_of

    faults = faults_of(options.bundle)
    if options.json:
        fields = ("code", "where", "path", "reason")
        print(json.dumps([{name: getattr(fault, name) for name in fields} for fault in faults], indent=2))
    else:
        for fault in faults:
            print(printable(f"{fault.where or options.bundle} {fault.path}: {fault.reason} [{fault.code}]"))
        count = "valid" if not faults else "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        print(f"{options.bundle}: {count}")
    return 1 if faults else 0


def _doctor(options: Any) -> int:
    from aotexport_runtime.commands.doctor import machine, of_bundle

    lines, is_loaded = of_bundle(options.bundle) if options.bundle else ([], True)
    print("\n".join(map(printable, [*machine(), *lines])))
    return 0 if is_loaded else 1


def _verify_signature(options: Any) -> int:
    from aotexport_runtime.bundle.read import open_bundle
    from aotexport_runtime.bundle.signature import Signed, moment, verify_signature

    options.at = None if options.at is None else moment(options.at)
    signed = Signed(**{field.name: getattr(options, field.name) for field in fields(Signed)})
    verify_signature(open_bundle(options.bundle), signed)
    print(f"{options.bundle}: signed by this signer, and as it was signed")
    return 0


def _selftest(options: Any) -> int:
    if options.sandbox:
        from aotexport_runtime import sandbox

        named = [*options.imports, *options.tensor_type]
        sandbox.enter(readable=[*options.bundle, *places_of(name.partition(".")[0] for name in named)])
    check_torch("a self-test")
    for name in options.imports:
        imported(name)
    from aotexport_runtime.bundle.read import open_bundle
    from aotexport_runtime.commands.results import describe_graphs
    from aotexport_runtime.commands.self_test import run_vectors
    from aotexport_runtime.schema.graph import DTENSOR
    from aotexport_runtime.values import meshes

    types = {name: class_named(name) for name in options.tensor_type}
    if DTENSOR in types:
        meshes.join_alone()
    results = [
        (path, result)
        for path in options.bundle
        for bundle in (open_bundle(path),)
        for target in options.target or ["auto"]
        for result in run_vectors(
            bundle,
            device=options.device,
            target=target,
            trust=options.trust,
            operator_namespaces=options.operator_namespace,
            tensor_types=types,
            mapped=options.mapped or None,
        )
    ]
    if options.json:
        print(json.dumps([{"bundle": path, **asdict(each), "agrees": each.agrees} for path, each in results]))
    for path in () if options.json else options.bundle:
        for line in describe_graphs([result for at, result in results if at == path]):
            print(printable(line if line.startswith(" ") else f"{path}: {line}"))
    if not (results or options.json):
        print("no recorded calls")
    return 0 if all(result.agrees for _, result in results) else 1


def _report(options: Any) -> int:
    check_torch("a report")
    from aotexport_runtime.bundle.read import open_bundle
    from aotexport_runtime.inspection.recorded import portable
    from aotexport_runtime.inspection.report import write_report

    load = portable(options.imports, options.operator_namespace, options.tensor_type)
    write_report(open_bundle(options.bundle), load, Path(options.output), timed=not options.no_measure)
    print(printable(f"report: {options.output}"))
    return 0


def _finetune(given: list[str]) -> int:
    check_torch("training")
    try:
        from aotexport_runtime.finetune.command import finetune
    except ImportError as error:
        raise NotSupported(
            f"training needs click and rich ({error}): pip install 'aotexport-runtime[finetune]'"
        ) from None
    finetune.main(given, prog_name="python -m aotexport_runtime finetune")
    return 0


def _explain(options: Any) -> int:
    from aotexport_runtime.commands.explain import explain

    print(explain(options.name))
    return 0


def _pull(options: Any) -> int:
    from aotexport_runtime.commands.hub import pull

    print(printable(f"{pull(options.address, options.output, force=options.force)}: a bundle, and valid"))
    return 0


def _serve(options: Any) -> int:
    from aotexport_runtime.server.supervisor import serve

    return serve(options_of(options))


def _triton_config(options: Any) -> int:
    check_torch("Triton's configuration")
    from aotexport_runtime.server.triton_config import triton_config
    from aotexport_runtime.serving.servable import Servable

    servable = Servable(options.bundle, max_batch_size=options.max_batch_size)
    servable.warm_up()
    name = options.name or Path(options.bundle).resolve().name
    size = options.max_batch_size
    print(triton_config(name, servable.inputs, servable.outputs, servable.batch_axes, max_batch_size=size), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
