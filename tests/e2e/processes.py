"""Commands and scripts as users run them.

Processes of their own have the runtime's wheel and not the exporter. Others are forks, or run in this process, where
it makes no difference: `test_cli.py` and the pages that begin with an install run the same commands in processes.
"""

import contextlib
import io
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from aotexport.cli import app
from aotexport_runtime.cli.app import main as runtime
from tests import forked

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed; return what it printed."""
    process = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return process.stdout


def run_command(*arguments: str | Path, cwd: Path) -> str:
    """Run `aotexport ...` or `python -m aotexport_runtime ...` in this process; return what it printed."""
    words = [str(word) for word in arguments]
    with contextlib.chdir(cwd):
        if words[0] == "aotexport":
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, result.output
            return result.stdout
        assert words[:3] == ["python", "-m", "aotexport_runtime"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert runtime(words[3:]) == 0, printed.getvalue()
        return printed.getvalue()


def run_python(path: Path | None, *arguments: str | Path, cwd: Path, text: str | None = None) -> str:
    """Run a script that must succeed, or `text`, in a fork; return what it printed."""
    process = forked.run_script(path, *map(str, arguments), cwd=cwd, text=text)
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
        run_command("aotexport", model_file, "-o", "bundle", cwd=self.directory)
        return "bundle"

    def alone(self, script: str, *arguments: str | Path) -> dict[str, Any]:
        """Run a script without the exporter and the model's code; return its report."""
        command = (self.runtime_python, "-I", EXAMPLES / "alone.py", EXAMPLES / self.name / "deploy" / script)
        run(*command, *arguments, "--report", "report.json", cwd=self.directory)
        return self._report()

    def eager(self, *arguments: str | Path) -> dict[str, Any]:
        """Run the twin in eager mode; return its report."""
        return self.beside("eager.py", *arguments)

    def beside(self, script: str, *arguments: str | Path) -> dict[str, Any]:
        """Run a script that imports the model's code or trainers; return its report."""
        run_python(EXAMPLES / self.name / script, *arguments, "--report", "report.json", cwd=self.directory)
        return self._report()

    def _report(self) -> dict[str, Any]:
        return json.loads((self.directory / "report.json").read_text(encoding="utf-8"))
