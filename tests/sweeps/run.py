"""Run samples: export each, then all their self-tests, by both graphs, in one fresh process."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aotexport
import aotexport_runtime
from tests.sweeps.sample import Sample
from tests.sweeps.table import CRASHED, DROPPED, EQUAL, FORWARD, REFUSED, REFUSED_LATE, WRONG, Outcome

TIMEOUT_S = 900


def run(samples: Iterable[tuple[str, Sample]], directory: Path) -> dict[str, list[Outcome]]:
    """Return how the samples of each item came out.

    Args:
        samples: what to run, with the item that each belongs to.
        directory: for the bundles; they are removed again.
    """
    outcomes: dict[str, list[Outcome]] = {}
    exported: dict[str, str] = {}
    for number, (item, sample) in enumerate(samples):
        path = directory / f"bundle{number}"
        failure = _export(sample, path)
        outcomes.setdefault(item, []).extend([failure] if failure else [])
        if failure is None:
            exported[str(path)] = item
    for path, outcome in _self_tests(list(exported)).items():
        outcomes[exported[path]].append(outcome)
        shutil.rmtree(path)
    return outcomes


def _export(sample: Sample, path: Path) -> Outcome | None:
    """Export a sample; return how that failed, or None."""
    try:
        # Operators, and torch while it compiles bodies, warn of their deprecations.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            aotexport.export(sample.function, sample.args, sample.kwargs, output=path, verify=False, **sample.options)
    except aotexport.AotExportError as error:
        return Outcome(REFUSED, stable(str(error)))
    except Exception as error:
        return Outcome(CRASHED, f"{type(error).__name__}: {stable(str(error))}")
    return None


def _self_tests(paths: list[str]) -> dict[str, Outcome]:
    """Return the outcome per bundle."""
    if not paths:
        return {}
    process = subprocess.run(_command(paths), capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if process.returncode not in (0, 1) or not process.stdout:
        if len(paths) == 1:
            end = (process.stderr.strip().splitlines() or [""])[-1]
            return {paths[0]: Outcome(CRASHED, f"self-test ended with {process.returncode}: {stable(end)}")}
        half = len(paths) // 2
        return _self_tests(paths[:half]) | _self_tests(paths[half:])
    results = json.loads(process.stdout.splitlines()[-1])
    return {path: _verdict(path, [result for result in results if result["bundle"] == path]) for path in paths}


def _command(paths: list[str]) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "aotexport_runtime", "selftest", *paths, "--json"]
    command += ["--target", "autograd", "--target", "portable"]
    requirements = [aotexport_runtime.open_bundle(path).manifest.requirements for path in paths]
    # This package makes torch's collections importable, one of which registers an operator that names no module.
    modules = ["tests.sweeps", "torch.testing._internal.hop_db"]
    modules += sorted({name for needed in requirements for name in needed.operator_modules})
    namespaces = sorted({name for needed in requirements for name in needed.operator_namespaces})
    if namespaces:
        command += [option for name in modules for option in ("--import", name)]
    return command + [option for name in namespaces for option in ("--operator-namespace", name)]


def _verdict(path: str, results: list[dict[str, Any]]) -> Outcome:
    bundle = aotexport_runtime.open_bundle(path)
    programs = {name: bundle.program(name) for name in bundle.program_names}
    # Custom autograd functions are in joint graphs only; the forward graph is not asked for gradients then.
    joint_only = [name for name, program in programs.items() if program.grad and not program.forward.differentiable]
    failures = [
        _failure(result)
        for result in results
        if not result["agrees"] and (result["target"], result["program"] in joint_only) != ("autograd", True)
    ]
    if failures:
        worst = next((failure for failure in failures if failure.kind == WRONG), failures[0])
        failing = {(result["target"], result["program"]) for result in results if not result["agrees"]}
        served = all(target == "portable" and programs[name].forward.differentiable for target, name in failing)
        return Outcome(DROPPED, worst.why) if served else worst
    reasons = sorted({refusal.reason for program in programs.values() for refusal in program.refusals})
    return Outcome(FORWARD, stable("; ".join(reasons))) if reasons else Outcome(EQUAL)


def _failure(result: dict[str, Any]) -> Outcome:
    where = f"{result['program']}/{result['vector']} by {result['target']}"
    if result["error"].startswith("NotSupported"):
        return Outcome(REFUSED_LATE, stable(result["error"]))
    if result["error"]:
        return Outcome(WRONG, f"{where}: raised {stable(result['error'])}")
    first = next(difference for difference in result["differences"] if not difference["agrees"])
    seen = f"expected {first['expected']}, got {first['got']}" if first["expected"] else f"error {first['error']:.0e}"
    return Outcome(WRONG, f"{where}: {first['name']}: {stable(seen)}")


def stable(text: str) -> str:
    """Return the begin of a message on one line, without what differs between runs and machines."""
    line = re.sub(r"\S+\.py:\d+:? (in \S+: )?", "", " ".join(text.split()))
    return re.sub(r"\b0x[0-9a-f]+", "0x…", line)[:300]
