"""Results of recorded calls that ran again, and what they say in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.engines.candidates import AUTOGRAD, PORTABLE
from aotexport_runtime.engines.runs import EngineRun, words
from aotexport_runtime.errors import SelfTestFailed
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values.compare import TOLERANCES, Difference


@dataclass(frozen=True)
class VectorResult:
    """One recorded call, run again.

    Attributes:
        vector: name of the recorded call.
        target: engine that ran it.
        differences: every compared quantity.
        error: the error of the call, or that the requested target ran none of it; empty: neither.
        ran: the passes of the program that ran, with their engines.
        left_out: why values were not compared, but only shapes, dtypes and the like; empty: they were.
        graph: what the engine runs of the program, in words.
        not_run: why the engine did not run the program here, then of no recorded call; empty: it did.
    """

    program: str
    vector: str
    target: str
    differences: list[Difference]
    error: str = ""
    device: str = ""
    ran: tuple[EngineRun, ...] = ()
    left_out: str = ""
    graph: str = ""
    not_run: str = ""

    @property
    def agrees(self) -> bool:
        """Whether everything is within tolerance."""
        return not self.error and all(difference.agrees for difference in self.differences)


def rounding(bundle: Bundle, program: str) -> float:
    """Return the tolerance of the coarsest dtype that `program` computes in."""
    nodes = bundle.graph(program, bundle.program(program).forward.file).nodes
    return max((TOLERANCES.get(n.meta.dtype, 0.0) for n in nodes if isinstance(n.meta, TensorMeta)), default=0.0)


def least_tolerance(bundle: Bundle, program: str, target: str, *, exact: bool = True) -> float:
    """Return the least tolerance of results by `target`; `exact`: the machine computes as that of the export.

    Graphs that are asked for by name give eager's results, but under autocast. Other kernels, also those that `auto`
    finds on the machine, round at other places, which shows in results of finer dtypes as well.
    """
    is_eagers = exact and target in (PORTABLE, AUTOGRAD) and bundle.program(program).autocast is None
    return 0.0 if is_eagers else rounding(bundle, program)


def check_results(results: Iterable[VectorResult]) -> None:
    """Raise `SelfTestFailed`, with a line per quantity that differs, if one does."""
    failures = [line for result in results for line in describe_failures(result)]
    if failures:
        raise SelfTestFailed("the bundle disagrees with eager execution:\n" + "\n".join(failures))


def describe_failures(result: VectorResult) -> list[str]:
    """Return one line per quantity that differs."""
    graph = result.graph and f", {result.graph}"
    where = f"  {result.program}/{result.vector}{graph} ({result.target}): "
    if result.error:
        return [f"{where}raised {result.error}"]
    lines: list[str] = []
    for difference in result.differences:
        if difference.agrees:
            continue
        if difference.expected or difference.got:
            lines.append(f"{where}{difference.name}: expected {difference.expected}, got {difference.got}")
        else:
            lines.append(f"{where}{difference.name}: relative error {difference.error:.2e}")
    return lines


def describe_graphs(results: Iterable[VectorResult]) -> list[str]:
    """Return a line per program and graph: what was compared, by what; each followed by a line per difference."""
    graphs: dict[tuple[str, str, str], list[VectorResult]] = {}
    for result in results:
        graphs.setdefault((result.program, result.target, result.graph), []).append(result)
    lines: list[str] = []
    for (program, target, graph), group in graphs.items():
        head, first = f"{program}, {graph} ({target}): ".removeprefix(", "), group[0]
        if first.not_run:
            lines.append(f"{head}not run: {first.not_run}")
            continue
        differences = [difference for result in group for difference in result.differences]
        kinds = {"outputs": "", "gradients": ": gradient of ", "state": ": state "}
        found = [kind for kind, part in kinds.items() if any(part in each.name for each in differences)]
        *others, last = found or ["outputs"]
        compared = f"{', '.join(others)} and {last}" if others else last
        verdict = "ok" if all(result.agrees for result in group) else "FAILED"
        said = f"{verdict}, {compared} of {len(group)} call{'s'[: len(group) > 1]}"
        said += f", relative error {max((each.error for each in differences), default=0.0):.1e}"
        runs = dict.fromkeys(run for result in group for run in result.ran)
        said += f", {words(runs)} on {first.device}" if runs else ""
        left_out = next((result.left_out for result in group if result.left_out), "")
        lines.append(head + said + (f"; values not compared: {left_out}" if left_out else ""))
        lines += [line for result in group for line in describe_failures(result)]
    return lines
