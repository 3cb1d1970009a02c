"""`python -m tests.writers.replacing BUNDLE LOADS`: load a bundle so often, and replace it meanwhile.

Eight processes load, three write until the last load. Prints what each did, and the errors.
"""

import json
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import aotexport_runtime

WRITERS, LOADERS = 3, 8


def write(path: Path, number: int) -> None:
    """Write a bundle whose parameters are all one number."""
    module = aotexport_runtime.load(path)
    for parameter in module.parameters():
        parameter.data.fill_(number)
    aotexport_runtime.save(module, path, force=True)


def load(path: Path, _: int) -> None:
    """Load a bundle, digests and all, and compare it with the calls that were recorded for its parameters."""
    module = aotexport_runtime.load(path)
    numbers = torch.cat([parameter.flatten() for parameter in module.parameters()])
    assert (numbers == numbers[0]).all(), "parameters of two bundles"
    aotexport_runtime.selftest(module.bundle)


def repeat(work: Callable[[Path, int], None], path: Path, until: Callable[[int], bool]) -> None:
    """Run a function until it has run often enough; print how often it did, and the errors that it raised."""
    done, errors = 0, list[str]()
    while not until(done + len(errors)):
        try:
            work(path, done)
            done += 1
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    os.write(1, f"{json.dumps({'work': work.__name__, 'done': done, 'errors': errors[:3]})}\n".encode())


def main() -> None:
    """Run the command line."""
    path, loads = Path(sys.argv[1]), int(sys.argv[2])
    write(path, 0)
    over, end = os.pipe()
    works: list[tuple[Callable[[Path, int], None], Callable[[int], bool]]] = [
        *[(load, lambda ran: ran >= loads // LOADERS)] * LOADERS,
        *[(write, lambda _: bool(select.select([over], [], [], 0)[0]))] * WRITERS,
    ]
    children = list[int]()
    for work, until in works:
        child = os.fork()
        if not child:
            os.close(end)
            repeat(work, path, until)
            os._exit(0)
        children.append(child)
    for child in children[:LOADERS]:
        os.waitpid(child, 0)
    os.close(end)
    for child in children[LOADERS:]:
        os.waitpid(child, 0)
    # The last writer removes what the others, which are gone, had open.
    write(path, 0)


if __name__ == "__main__":
    main()
