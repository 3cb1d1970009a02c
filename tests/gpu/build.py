"""`python -m tests.gpu.build DIRECTORY [MODEL ...]`: export the models for machines that cannot.

Large ones are written without weights, which the benchmark makes again.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import aotexport
from tests.gpu.light import make_light
from tests.gpu.models import LARGE, SMALL, make


def build(directory: Path, names: Iterable[str], target: str = "cuda") -> None:
    """Write a bundle with kernels per model below `directory`, where there is none yet."""
    for name in names:
        if not (directory / name).exists():
            model, args = make(name)
            aotexport.export(model, args, output=directory / name, targets=(target,), verify=False)


def main(directory: Path, names: Iterable[str]) -> None:
    """Write the bundles, the large ones light."""
    for name in names:
        build(directory, [name])
        if name in LARGE:
            make_light(directory / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [*SMALL, *LARGE])
