"""What a command tells its user, as the tables of mistakes compare it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aotexport.cli import app

NN = "import torch\nfrom torch import nn\n\n"
X = "example_inputs = (torch.ones(3, 4),)\n"
LINEAR = f"{NN}model = nn.Linear(4, 2)\n{X}"
STAGES = (
    "import torch",
    "load ",
    "read ",
    "example call",
    "train: ",
    "infer: ",
    "write weights",
    "record eager results",
)


def told(result_stderr: str) -> str:
    """Return the message, after the stages of the export or the usage."""
    lines = result_stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(("error: ", "Error: ")))
    usage = lines[0].startswith("Usage: ")
    assert usage or all(line.startswith((*STAGES, "compare with ")) for line in lines[:first])
    return "\n".join(lines[first:]).partition(": ")[2]


def check(command: str, code: int, text: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = sorted(path.name for path in here.iterdir())
    result = CliRunner().invoke(app, command.split())
    closed = "no directory can be made (No such file or directory)" if os.geteuid() == 0 else "you may not write"
    expected = text.replace("{here}", str(here)).replace("{closed}", closed)
    assert (result.exit_code, told(result.stderr), result.stdout) == (code, expected, "")
    # Neither torch's own reports around the message, nor half a bundle.
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in here.iterdir()) == files


def check_raises(
    act: Callable[[], Any], kind: type[Exception], text: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = sorted(path.name for path in here.iterdir())
    with pytest.raises(kind) as caught:
        act()
    assert str(caught.value) == text.replace("{here}", str(here))
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in here.iterdir()) == files


def rows_of(**tables: dict[str, Any]) -> list[Any]:
    return [pytest.param(*row, id=f"{table}_{name}") for table, rows in tables.items() for name, row in rows.items()]
