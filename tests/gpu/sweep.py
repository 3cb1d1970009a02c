"""`python -m tests.gpu.sweep BUNDLE ...`: run the recorded calls of many bundles on a GPU; prints what fails.

Several processes share the GPU. A process whose context is lost by one bundle is replaced for the next.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import queue
import subprocess
import sys
import threading
from pathlib import Path

MODULES = ("tests.cases.operators", "tests.cases.triton_kernels", "tests.interpreter.models")
"""Modules that register operators which bundles may call."""
NAMESPACES = ("aotexport_cases", "aotexport_triton", "aotexport_interpreter")
LOST = ("CUDA error", "cudaError", "CUDA_ERROR_ILLEGAL", "CUDA_ERROR_LAUNCH", "CUDNN_STATUS", "CUBLAS_STATUS")


def work(device: str) -> None:
    """Run `target bundle` per line of the input; print one JSON line per bundle."""
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    from aotexport_runtime.commands.results import describe_failures
    from aotexport_runtime.commands.self_test import run_vectors
    from tests.scaled import Block, FastInt8, Recipe, Rounding, ScaledInt8

    types = (Block, FastInt8, Recipe, Rounding, ScaledInt8, TwoTensor)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    for name in MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append("warned: " + record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aotexport_runtime").addHandler(handler)
    for line in sys.stdin:
        target, path = line.rstrip("\n").split("\t")
        lines.clear()
        try:
            trust = "native" if target == "cuda" else "data"
            results = run_vectors(
                path, device=device, target=target, trust=trust, operator_namespaces=NAMESPACES, tensor_types=types
            )
            lines += [text.strip() for result in results for text in describe_failures(result)]
            calls = len(results)
        except Exception as error:
            lines.append(f"{type(error).__name__}: {error}")
            calls = 0
        print(json.dumps([calls, lines]), flush=True)
        if any(mark in text for mark in LOST for text in lines):
            return


def drain(jobs: queue.SimpleQueue[tuple[str, str]], found: dict[tuple[str, str], tuple[int, list[str]]], device: str):
    """Run jobs in processes until there are none."""
    process: subprocess.Popen[str] | None = None
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            break
        if process is None or process.poll() is not None:
            command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.sweep", "--worker", "--device", device]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\t".join(job) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        found[job] = tuple(json.loads(answer)) if answer else (0, [f"process ended with {process.wait()}"])
        if not answer or any(mark in text for mark in LOST for text in found[job][1]):
            process.wait()
            process = None
    if process is not None:
        process.communicate()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sweep", description=__doc__)
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument("--targets", default="cuda,portable,autograd")
    parser.add_argument("--device", default="cuda", help="cpu: try the script itself")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.device)
        return
    jobs: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for target, bundle in itertools.product(options.targets.split(","), options.bundles):
        if target != "cuda" or (bundle / "targets/cuda").is_dir():
            jobs.put((target, str(bundle)))
    found: dict[tuple[str, str], tuple[int, list[str]]] = {}
    threads = [threading.Thread(target=drain, args=(jobs, found, options.device)) for _ in range(options.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (target, path), (_, lines) in sorted(found.items()):
        for text in lines[:3]:
            print(f"{target} {path}: {text[:300]}")
    for target in options.targets.split(","):
        own = [value for (of, _), value in found.items() if of == target]
        right = sum(calls > 0 and not lines for calls, lines in own)
        print(f"{target}: {right} of {len(own)} bundles, {sum(calls for calls, _ in own)} recorded calls")


if __name__ == "__main__":
    main()
