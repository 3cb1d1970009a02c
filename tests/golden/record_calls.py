"""Write what eager shows of the golden calls to `calls/cases.json`, anew: `python -m tests.golden.record_calls`."""

import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.golden.cases import CASES
from tests.golden.observe import CALLS, HERE, Observer
from tests.golden.places import place
from tests.golden.refuse import bundle_of, edited_bundle


class Model:
    """A model of `cases.py`, or a loaded bundle in its place."""

    def __init__(self, golden: str, mode: str, loaded: nn.Module | None = None) -> None:
        """Build the model of a golden; `mode` is that of the program."""
        torch.manual_seed(0)
        self.case = CASES[golden]()
        self._model = self.case.model if loaded is None else loaded
        if isinstance(self._model, nn.Module) and mode != "function":
            self._model.train(mode == "train")

    def call(self, arguments: dict[str, Any], changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """See `Subject`."""
        model = self.case.model
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
        bound = signature.bind(*self.case.args, **self.case.kwargs)
        place(bound.arguments, arguments, changes)
        others = {name: bound.arguments.pop(name) for name in set(bound.arguments) - set(signature.parameters)}
        return self._model(*bound.args, **bound.kwargs, **others), bound.arguments

    def state(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name."""
        if not isinstance(self.case.model, nn.Module):
            return {}
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a parameter."""
        module, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(module), own, tensor)


def recorded(name: str, root: Path) -> dict[str, Any]:
    """Return a golden call with what eager shows of it; `root` is where its bundle may be edited."""
    case = {key: value for key, value in CALLS[name].items() if key not in ("facts", "values")}
    bundle = edited_bundle(case, root / name) if "edits" in case else bundle_of(case["golden"])
    mode = json.loads((bundle / f"programs/{case['program']}/program.json").read_text(encoding="utf-8"))["mode"]
    if case["graph"] == "refused":
        return case
    seen = Observer(case, bundle, Model(case["golden"], mode))
    return {**case, "facts": seen.facts, "values": seen.values}


def text_of(cases: dict[str, Any]) -> str:
    """Return the text of the file, a line a call."""
    lines = [f"{json.dumps(name)}: {json.dumps(case, sort_keys=True)}" for name, case in cases.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        found = {name: recorded(name, Path(directory)) for name in CALLS}
    (HERE / "calls/cases.json").write_text(text_of(found), encoding="utf-8")
