"""Runs a script in a process that has neither the exporter nor the example's model.

    .venv-runtime/bin/python -I examples/alone.py examples/digits_cnn/deploy/train.py ...

Stops with exit code 3 when the exporter or `model` could be imported, or when the script imported a model library.
`-I` keeps the working directory and PYTHONPATH off the import path.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

EXPORTER = ("aotexport", "model")
MODEL_CODE = ("transformers", "sentence_transformers")


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    importable = [name for name in EXPORTER if importlib.util.find_spec(name) is not None]
    if importable:
        print(f"{sys.executable} can import {', '.join(importable)}: use .venv-runtime/bin/python -I", file=sys.stderr)
        sys.exit(3)
    runpy.run_path(sys.argv[0], run_name="__main__")
    imported = [name for name in (*EXPORTER, *MODEL_CODE) if name in sys.modules]
    if imported:
        print(f"{sys.argv[0]} imported {', '.join(imported)}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
