"""Makes a virtual environment that holds the runtime's wheel and nothing else of this repository.

    python examples/runtime_venv.py .venv-runtime

Third-party packages (torch, numpy, safetensors, msgspec, ...) are borrowed from the environment that runs this
script, by a path file: the editable installs of that environment are not followed, so that `import aotexport`
fails in the new one.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

RUNTIME = Path(__file__).resolve().parent.parent / "runtimes" / "python"


def build_wheel(into: Path) -> Path:
    """Return the runtime's wheel, built into `into`."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(RUNTIME)]
    subprocess.run(command, check=True)
    return next(into.glob("aotexport_runtime-*.whl"))


def create(directory: Path) -> Path:
    """Make the environment in `directory`, in place of an older one; return its interpreter."""
    venv.create(directory, clear=True, with_pip=False)
    interpreter = directory / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)}))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(Path(scratch))
        install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    return interpreter


if __name__ == "__main__":
    print(create(Path(sys.argv[1])))
