"""A row of the table of golden calls."""

from typing import Any

CALL: dict[str, Any] = {"call": True}
WITHOUT: dict[str, Any] = {"call": False}
BACKWARD: dict[str, Any] = {"backward": []}


def backward(*roots: str, **options: Any) -> dict[str, Any]:
    """Return the step of a backward pass from outputs or arguments; none named: from all outputs."""
    return {"backward": list(roots), **options}


def change(path: str, *, recorded: bool = False) -> dict[str, Any]:
    """Return the step that doubles a tensor in place."""
    return {"change": path, "recorded": recorded}


def edit(file: str, at: list[Any], value: Any) -> dict[str, Any]:
    """Return an edit of a file of the bundle."""
    return {"file": file, "at": at, "set": value}


PROGRAM = "programs/train/program.json"
FUNCTIONAL = "functional"

CALLS: dict[str, dict[str, Any]] = {}


def golden_call(
    name: str,
    rule: str,
    golden: str,
    graph: str,
    *steps: dict[str, Any],
    program: str = "train",
    edits: list[dict[str, Any]] | None = None,
    containers: dict[str, dict[str, Any]] | None = None,
    seen: list[str] | None = None,
    **arguments: dict[str, Any],
) -> None:
    """Add a golden call.

    Args:
        name: what it shows.
        rule: number of the rule that it shows.
        golden: the bundle that it is a call of.
        graph: `functional`, `forward`: the graph that serves it where a reader has both; `refused`.
        steps: what is done; none: a call that records gradients, and a backward pass.
        program: of the bundle.
        edits: of the bundle.
        containers: by path, how they differ from those of the recorded call.
        seen: paths of containers whose items are noted after the call.
        arguments: by path, what differs from the recorded call.
    """
    assert name not in CALLS
    found: dict[str, Any] = {"rule": rule, "golden": golden, "program": program, "graph": graph}
    found["steps"] = list(steps) or ([CALL] if graph == "refused" else [CALL, BACKWARD])
    paths = {path.replace("args0", "args[0]").replace("args1", "args[1]"): said for path, said in arguments.items()}
    more = {"edits": edits, "arguments": paths, "containers": containers, "seen": seen}
    CALLS[name] = {**found, **{key: value for key, value in more.items() if value}}


NO_GRAD, GRAD = {"requires_grad": False}, {"requires_grad": True}
MOVED = {"offset": 1}
COLUMNS = {"stride": [1, 4]}
LEAF, NO_LEAF = {"is_leaf": True}, {"is_leaf": False}
HOOKED = {"hook": True}
