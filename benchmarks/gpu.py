"""`python -m benchmarks.gpu`: bundles with kernels on a GPU beside eager and `torch.compile`; prints Markdown.

On a machine without the exporter's torch, give bundles that `python -m tests.gpu.build DIRECTORY` wrote elsewhere.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from aotexport_runtime import CudaRuntime, load
from aotexport_runtime.engines.cuda import engine
from aotexport_runtime.engines.cuda.tuning import device_time
from tests.gpu.light import fill
from tests.gpu.models import LARGE, SMALL, make

WARM_UPS, REPETITIONS = 10, 30
COPIED_NBYTES = 1 << 30
FEWEST_BYTES = 128 << 20
"""What kernels that move less read and write may stay in a cache."""

_FIRST_STEP = """
import time; begin = time.perf_counter()
import torch
torch.empty(1, device={device!r}); imported = time.perf_counter()
from tests.gpu.models import make
model, args = make({name!r})
args = [arg.to({device!r}) for arg in args]; made = time.perf_counter()
from benchmarks.gpu import step, system
step(system({system!r}, model, {path!r}, {device!r}), args)()
if {device!r} == "cuda": torch.cuda.synchronize()
print(imported - begin, time.perf_counter() - made)
"""


def system(name: str, model: torch.nn.Module, path: str, device: str) -> torch.nn.Module:
    """Return the model as a system runs it, on the device."""
    if name == "eager":
        return model.to(device)
    if name.startswith("torch.compile"):
        mode = "reduce-overhead" if name.endswith("graphs") else "default"
        return torch.compile(model.to(device), mode=mode)
    options = CudaRuntime(cuda_graphs=name.endswith("graphs"))
    return load(path, device=device, trust="native", cuda=options)


SYSTEMS = ("eager", "torch.compile", "torch.compile, graphs", "bundle", "bundle, graphs")


def step(model: Any, args: list[torch.Tensor]) -> Callable[[], None]:
    """Return one step of training: forward, backward, and the optimizer."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)

    def run() -> None:
        optimizer.zero_grad()
        model(*args).backward()
        optimizer.step()

    return run


def inference(model: Any, args: list[torch.Tensor]) -> Callable[[], None]:
    """Return one call without gradients."""
    model.eval()

    def run() -> None:
        with torch.no_grad():
            model(*args)

    return run


def milliseconds(run: Callable[[], None], device: str) -> float:
    """Return the median time of a call, from an idle device to an idle device."""
    for _ in range(WARM_UPS):
        run()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(REPETITIONS):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def first_step(name: str, which: str, path: Path, device: str) -> str:
    """Return the seconds to the end of the first step of a fresh process, `import torch` apart."""
    code = _FIRST_STEP.format(name=name, system=which, path=str(path), device=device)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if process.returncode:
        return (process.stderr.strip().splitlines() or ["failed"])[-1][:80]
    imported, took = map(float, process.stdout.split()[-2:])
    return f"{took:.2f} (after {imported:.2f} for torch)"


def speeds(names: list[str], bundles: Path, device: str) -> Iterator[str]:
    """Yield the lines of the table of times."""
    yield "| model | system | train step, ms | inference, ms | first step, s |"
    yield "|---|---|---:|---:|---:|"
    for name in names:
        for which in SYSTEMS:
            model, args = make(name)
            args = [arg.to(device) for arg in args]
            running = system(which, model, str(bundles / name), device)
            found = [milliseconds(kind(running, args), device) for kind in (step, inference)]
            torch.compiler.reset()
            first = first_step(name, which, bundles / name, device)
            yield f"| {name} | {which} | {found[0]:.3f} | {found[1]:.3f} | {first} |"


def bandwidths(names: list[str], bundles: Path) -> Iterator[str]:
    """Yield the lines of the table of kernels that move much memory, beside a copy."""
    source = torch.empty(COPIED_NBYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * COPIED_NBYTES / device_time(lambda: None, lambda: target.copy_(source)) / 1e6
    yield f"\nA copy moves {copied:.0f} GB/s. Kernels, every argument counted once:\n"
    yield "| model | kernel | MB | GB/s | of a copy |"
    yield "|---|---|---:|---:|---:|"
    for name in names:
        for kernel, (nbytes, took) in _kernel_times(name, bundles / name).items():
            if nbytes >= FEWEST_BYTES:
                speed = nbytes / took / 1e6
                yield f"| {name} | {kernel} | {nbytes / 1e6:.0f} | {speed:.0f} | {speed / copied:.0%} |"


def _kernel_times(name: str, path: Path) -> dict[str, tuple[int, float]]:
    """Return, per kernel of a step of training, the bytes of its arguments and the milliseconds that it takes."""
    found: dict[str, tuple[int, float]] = {}
    make_launch = engine._launch

    def timing(kernel: Any, *rest: Any) -> Callable[..., None]:
        launch = make_launch(kernel, *rest)

        def run(**arguments: Any) -> None:
            launch(**arguments)  # The first one is tuned.
            tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
            # Kernels that work in place are timed on copies: the step goes on.
            copies = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
            }
            took = device_time(lambda: None, lambda: launch(**copies))
            found[kernel.name] = sum(tensor.nbytes for tensor in tensors), took

        return run

    engine._launch = timing
    try:
        args = make(name)[1]
        module = load(path, device="cuda", target="cuda", trust="native", cuda=CudaRuntime(verify="never"))
        step(module, [arg.to("cuda") for arg in args])()
    finally:
        engine._launch = make_launch
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(LARGE), help=f"{', '.join([*SMALL, *LARGE])}")
    parser.add_argument("--bundles", type=Path, help="directory of bundles; default: export them now")
    parser.add_argument("--device", default="cuda", help="cpu: try the script itself")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bundles = options.bundles or Path(scratch)
        if options.bundles is None:
            from tests.gpu.build import build

            build(bundles, options.models)
        for model in options.models:
            fill(bundles / model)
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        print(f"{name}, torch {torch.__version__}\n")
        for line in speeds(options.models, bundles, options.device):
            print(line, flush=True)
        if options.device == "cuda":
            for line in bandwidths(options.models, bundles):
                print(line, flush=True)


if __name__ == "__main__":
    main()
