"""`make demo`: the way of a model from its code to a tuned bundle, and its twin in eager mode beside it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

EXAMPLE = Path("examples/digits_cnn")
console = Console()


def run(title: str, *command: str | Path) -> None:
    """Show and run a command; stop with its exit code when it fails."""
    words = [str(word) for word in command]
    console.print(f"\n[bold]{title}[/bold]\n[dim]$ {shlex.join(words)}[/dim]", highlight=False, soft_wrap=True)
    code = subprocess.run(words, check=False).returncode
    if code:
        sys.exit(code)


def compare(bundle: dict[str, Any], served: dict[str, Any], eager: dict[str, Any]) -> bool:
    """Print the losses side by side; return whether the twins agree."""
    table = Table("", *(Column(name, justify="right") for name in ("eager", "bundle", "difference")))
    close = True
    for epoch, (ours, theirs) in enumerate(zip(bundle["losses"], eager["losses"], strict=True), start=1):
        close = close and abs(ours - theirs) <= 1e-5 * theirs
        table.add_row(f"loss of epoch {epoch}", f"{theirs:.6f}", f"{ours:.6f}", f"{abs(ours - theirs):.1g}")
    same = sum(a == b for a, b in zip(served["predictions"], eager["predictions"], strict=True))
    total = len(eager["predictions"])
    table.add_section()
    table.add_row(
        "digits recognised",
        f"{eager['accuracy']:.2%}",
        f"{served['accuracy']:.2%}",
        f"{total - same} of {total} differ",
    )
    console.print()
    console.print(table)
    return close and same == total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", required=True, help="interpreter that has the runtime and not the exporter")
    parser.add_argument("--output", type=Path, required=True, help="directory for the bundles")
    options = parser.parse_args()
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    alone = (options.runtime, "-I", "examples/alone.py")
    untrained, tuned = output / "digits", output / "digits-tuned"
    reports = {name: output / f"{name}.json" for name in ("train", "serve", "eager")}
    python = Path(os.path.relpath(sys.executable))
    exporter = python.with_name("aotexport")
    run("1. Export the untrained network", exporter, EXAMPLE / "model.py", "-o", untrained, "--force")
    run(
        "2. Train it from the bundle, in a process that has neither the exporter nor the network's code",
        *(*alone, EXAMPLE / "deploy/train.py", untrained, tuned, "--report", reports["train"]),
    )
    run("3. Serve the tuned bundle", *alone, EXAMPLE / "deploy/serve.py", tuned, "--report", reports["serve"])
    run("4. The same in eager mode", python, EXAMPLE / "eager.py", "--report", reports["eager"])
    results = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in reports.items()}
    agree = compare(results["train"], results["serve"], results["eager"])
    verdict = "[green]The bundle trains and predicts as eager does.[/green]" if agree else "[red]They differ.[/red]"
    lines = ("", verdict, "", f"untrained bundle  {untrained}", f"tuned bundle      {tuned}")
    console.print(*lines, f"look inside       {exporter} inspect {tuned}", sep="\n", highlight=False, soft_wrap=True)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
