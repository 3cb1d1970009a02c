"""Processes as users start them: the exporter's, and one that has the runtime's wheel and not the exporter."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed; return what it printed."""
    process = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return process.stdout


@dataclass(frozen=True)
class Example:
    """One of the examples, with a directory for what it writes."""

    name: str
    directory: Path
    runtime_python: Path

    def export(self) -> str:
        """Export the example's model file from the command line; return the bundle's place."""
        model_file = EXAMPLES / self.name / "model.py"
        run(sys.executable, "-m", "aotexport", model_file, "-o", "bundle", cwd=self.directory)
        return "bundle"

    def alone(self, script: str, *arguments: str | Path) -> dict[str, Any]:
        """Run a script without the exporter and the model's code; return its report."""
        command = (self.runtime_python, "-I", EXAMPLES / "alone.py", EXAMPLES / self.name / "deploy" / script)
        return self._report(*command, *arguments)

    def eager(self, *arguments: str | Path) -> dict[str, Any]:
        """Run the twin in eager mode; return its report."""
        return self._report(sys.executable, EXAMPLES / self.name / "eager.py", *arguments)

    def _report(self, *command: str | Path) -> dict[str, Any]:
        report = self.directory / "report.json"
        run(*command, "--report", report, cwd=self.directory)
        return json.loads(report.read_text(encoding="utf-8"))
