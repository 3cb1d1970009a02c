"""`python -m aotexport_runtime COMMAND bundle/`, for containers without the exporter; `--help` lists the commands."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from aotexport_runtime.errors import AotExportError, ArgumentInvalid, printable
from aotexport_runtime.server.options import add_options, options_of
from aotexport_runtime.values.arguments import check_torch, imported, places_of


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit code: 0 well, 1 the bundle failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m aotexport_runtime", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="show what a bundle is; needs no torch")
    inspect.add_argument("bundle")
    inspect.add_argument("--program", help="show one program")
    inspect.add_argument("--graph", action="store_true", help="show the graphs")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    check = commands.add_parser("check", help="list every fault of a bundle, with its code and JSON path; runs nothing")
    check.add_argument("bundle")
    check.add_argument("--json", action="store_true", help="print JSON")
    test = commands.add_parser("selftest", help="compare a bundle with the recorded results of eager execution")
    test.add_argument("bundle", nargs="+")
    test.add_argument("--device", help="where to run, for example cuda")
    test.add_argument(
        "--target",
        action="append",
        help="engine to test alone (repeatable; default: all of the bundle)",
    )
    test.add_argument("--trust", choices=("data", "native"), default="data", help="native: run native files as well")
    test.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    test.add_argument("--operator-namespace", action="append", default=[], metavar="NAME")
    test.add_argument("--tensor-type", action="append", default=[], metavar="MODULE:NAME", help="class of tensors")
    test.add_argument("--sandbox", action="store_true", help="first give up writing, network, programs (Linux)")
    test.add_argument("--mapped", action="store_true", help="map weights; nobody may write into the files meanwhile")
    test.add_argument("--json", action="store_true", help="print JSON")
    add_options(commands.add_parser("serve", help="serve a directory of bundles by the Open Inference Protocol"))
    triton = commands.add_parser("triton-config", help="print the config.pbtxt of a bundle for Triton's Python backend")
    triton.add_argument("bundle")
    triton.add_argument("--name", help="of the model in Triton's repository (default: the directory's)")
    triton.add_argument("--max-batch-size", type=int, default=32, help="greatest joined batch (default: %(default)s)")
    _add_verify_signature(commands)
    options = parser.parse_args(argv)
    run = {
        "inspect": _inspect,
        "check": _check,
        "selftest": _selftest,
        "serve": _serve,
        "triton-config": _triton_config,
        "verify-signature": _verify_signature,
    }
    try:
        return run[options.command](options)
    except AotExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentInvalid) else 1


def _inspect(options: Any) -> int:
    from aotexport_runtime.bundle.read import open_bundle
    from aotexport_runtime.commands.describe import describe, summary

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


def _add_verify_signature(commands: Any) -> None:
    verify = commands.add_parser("verify-signature", help="verify who signed a bundle, and every file; needs no torch")
    verify.add_argument("bundle")
    verify.add_argument("--public-key", metavar="FILE", help="key of the signer")
    verify.add_argument("--certificate", action="append", default=[], metavar="FILE", help="of an authority")
    verify.add_argument("--identity", metavar="NAME", help="identity of the signer at --issuer")
    verify.add_argument("--issuer", metavar="URL", help="OpenID provider")
    verify.add_argument("--trust-config", metavar="FILE", help="trust of a Sigstore of one's own")
    verify.add_argument("--signature", metavar="FILE", help="the signature (default: model.sig in the bundle)")
    verify.add_argument("--at", metavar="TIME", help="when certificates must be valid (default: now), for archives")


def _verify_signature(options: Any) -> int:
    from aotexport_runtime.bundle.read import open_bundle
    from aotexport_runtime.bundle.signature import Signed, moment, verify_signature

    signed = Signed(
        public_key=options.public_key,
        certificate_chain=options.certificate,
        identity=options.identity,
        issuer=options.issuer,
        trust_config=options.trust_config,
        signature=options.signature,
        at=None if options.at is None else moment(options.at),
    )
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
    from aotexport_runtime.values import meshes

    types = {name: class_named(name) for name in options.tensor_type}
    if meshes.DTENSOR in types:
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
        import dataclasses

        print(json.dumps([{"bundle": p, **dataclasses.asdict(r), "agrees": r.agrees} for p, r in results]))
        return 0 if all(result.agrees for _, result in results) else 1
    for path in options.bundle:
        for line in describe_graphs([result for at, result in results if at == path]):
            print(printable(line if line.startswith(" ") else f"{path}: {line}"))
    if not results:
        print("no recorded calls")
    return 0 if all(result.agrees for _, result in results) else 1


def _serve(options: Any) -> int:
    from aotexport_runtime.server.supervisor import serve

    return serve(options_of(options))


def _triton_config(options: Any) -> int:
    check_torch("Triton's configuration")
    from pathlib import Path

    from aotexport_runtime.serving.servable import Servable
    from aotexport_runtime.serving.triton_config import triton_config

    servable = Servable(options.bundle, max_batch_size=options.max_batch_size)
    servable.warm_up()
    name = options.name or Path(options.bundle).resolve().name
    size = options.max_batch_size
    print(triton_config(name, servable.inputs, servable.outputs, servable.batch_axes, max_batch_size=size), end="")
    return 0


def class_named(name: str) -> type:
    """Return the class that the caller names `module:qualified.name`.

    Raises:
        ArgumentInvalid: there is none.
    """
    module, _, path = name.partition(":")
    found: Any = imported(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise ArgumentInvalid(f"`{name}` is no class; write MODULE:NAME, for example `mine.tensors:Int8Tensor`")
    return found


if __name__ == "__main__":
    sys.exit(main())
