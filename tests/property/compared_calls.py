"""Drawn calls of a bundle beside those of eager: `python -m tests.property.compared_calls [CASE or transformer ...]`.

The eager session runs once; the session of a bundle by each engine does the same, and every call of it is compared.
"""

import contextlib
import copy
import dataclasses
import math
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aotexport
from aotexport_runtime import AotExportError, load, open_bundle
from aotexport_runtime.commands.results import rounding
from aotexport_runtime.values.compare import TOLERANCES, compare
from aotexport_runtime.values.observe import Observation
from tests.cases import all_cases
from tests.cases.operators import NAMESPACE
from tests.cases.subclasses import TYPES
from tests.property.drawn_calls import PROPERTIES, Draws, Session

ENGINES = ("auto", "portable", "autograd")
SESSIONS = 8
"""Of a model, by each engine."""

CALLS = 4
"""Calls of a session."""

EXCLUDED = {
    "write_to_a_global": "eager and the bundle would write to one tensor",
    "linearized": "torch keeps copies of `x` as parameters, for which results require grad, and no gradient is seen",
}
"""Cases whose calls differ, with the reason."""

LENIENT = (
    "cannot register a hook on a tensor that doesn't",
    "you can only change requires_grad flags of leaf variables",
    "FlexAttention does not support backward on CPU",
)
"""Begins of errors of eager in calls that a bundle serves: it registers no hooks and sets no flags where nothing needs
them, and has other operators for attention."""


@dataclass(frozen=True)
class Model:
    """What is called.

    Attributes:
        name: the seed of all draws.
        module: returns the module or function, always with the same state.
        arguments: returns fresh positional and keyword arguments, always of the same values.
        options: further arguments of `aotexport.export`.
    """

    name: str
    module: Callable[[], Any]
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    options: dict[str, Any] = field(default_factory=dict)


def model_of(name: str) -> Model:
    """Return a case by its name, or a model of the zoo of transformers."""
    cases = {case.name: case for case in all_cases()}
    if name in cases:
        make = cases[name].make
        return Model(name, lambda: make()[0], lambda: make()[1:], cases[name].options)
    from tests.sweeps import zoo  # imports transformers

    (sample,) = zoo.items()[f"{name} static"]()
    return Model(name, lambda: copy.deepcopy(sample.function), lambda: ((), copy.deepcopy(sample.kwargs)))


@dataclass(frozen=True)
class Call:
    """How a call of a bundle came out.

    Attributes:
        kind: `equal`, `raises` (as eager does), `lenient` (see `LENIENT`), `refused`, `WRONG`.
        where: the seed of the session, the number of the call, the engine.
        why: what differs, or the refusal.
    """

    kind: str
    where: str
    why: str = ""


_FREED = "backward through the graph a second time"


def calls(model: Model, path: Path, sessions: int, engines: tuple[str, ...] = ENGINES) -> Iterator[Call]:
    """Run sessions of an exported model; return every call of its bundle.

    Args:
        model: what was exported.
        path: its bundle.
        sessions: how many; every kind of session in turn.
        engines: which load the bundle.
    """
    options = {"tensor_types": TYPES, "operator_namespaces": [NAMESPACE], "check_digests": False}
    bundle = open_bundle(path)
    modules = {engine: load(bundle, target=engine, **options) for engine in engines}
    least = max(rounding(bundle, program) for program in bundle.program_names)
    with torch.random.fork_rng(), warnings.catch_warnings(), _ordinary_attention():
        warnings.simplefilter("ignore")
        for number in range(sessions):
            seed = f"{model.name}/{PROPERTIES[number % len(PROPERTIES)]}/{number}"
            draws = [Draws.of(seed.split("/")[-2], f"{seed}/{call}") for call in range(CALLS)]
            eager, expected = Session(model.module(), model.arguments), []
            for draw in draws:
                expected.append(eager.call(draw))
                if "raises" in expected[-1].facts or "backward raises" in expected[-1].facts:
                    break
            for engine, module in modules.items():
                session, finer = Session(module.twin(), model.arguments), least if engine == "auto" else 0.0
                other = Session(model.module(), model.arguments)
                yield from _compared(f"{seed} {engine}", session, draws, expected, finer, other)


def _compared(
    where: str, session: Session, draws: list[Draws], expected: list[Observation], least: float, other: Session
) -> Iterator[Call]:
    """Make the calls of a session until one is not equal; later ones begin in another state."""
    for number, (draw, seen) in enumerate(zip(draws, expected, strict=False)):
        place = f"{where} call {number}"
        try:
            got = session.call(draw)
        except AotExportError as error:
            kind = "raises" if "raises" in seen.facts or "backward raises" in seen.facts else "refused"
            yield Call(kind, place, f"{type(error).__name__}: {error}")
            return
        if _FREED in got.facts.get("backward raises", "") and "backward raises" not in seen.facts:
            # One graph frees what it has saved for all of its outputs, and torch says what to pass.
            yield Call("refused", place, "RuntimeError: Trying to backward through the graph a second time")
            return
        texts = {name: (seen.facts.get(name), got.facts.get(name)) for name in ("raises", "backward raises")}
        if any(text for pair in texts.values() for text in pair):
            kind = "raises" if all(bool(a) is bool(b) for a, b in texts.values()) else "WRONG"
            kind = "lenient" if (texts["raises"][0] or "").startswith(LENIENT) and not texts["raises"][1] else kind
            yield Call(kind, place, f"{draw} {texts}")
            return
        rounded = any(each.autocast for each in draws[: number + 1])
        finer = max(least, TOLERANCES["bfloat16"] if rounded else 0.0)
        differences = [each for each in compare(seen, got, least=finer) if not each.agrees]
        if differences and rounded:
            own = _own_errors(other, draws[: number + 1], seen)
            differences = [each for each in differences if not each.absolute <= own.get(each.name, 0.0)]
        if differences:
            yield Call("WRONG", place, f"{draw} {[str(each) for each in differences[:4]]}")
            return
        yield Call("equal", place)


def _own_errors(eager: Session, draws: list[Draws], seen: Observation) -> dict[str, float]:
    """Return by how much eager under autocast, in the last of some calls, differs from eager without."""
    for draw in draws:
        wide = eager.call(dataclasses.replace(draw, autocast=False))
    for name, tensor in seen.values.items():
        if name in wide.values:
            wide.values[name] = wide.values[name].to(tensor.dtype)
    return {each.name: each.absolute for each in compare(seen, wide) if math.isfinite(each.absolute)}


def export(model: Model, path: Path) -> None:
    """Export a model, not verified, with all of a module's programs that can be asked for by name."""
    module, (args, kwargs) = model.module(), model.arguments()
    named = {"programs": ["train", "infer", "eval-joint"]} if isinstance(module, nn.Module) else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aotexport.export(module, args, kwargs, output=path, **{"verify": False} | named | model.options)


@contextlib.contextmanager
def _ordinary_attention() -> Iterator[None]:
    """Keep eager from its fused attention of inference, whose results have other strides."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def summary(found: Iterable[Call]) -> str:
    """Return how many calls came out how, and the refusals by kind."""
    kinds: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for call in found:
        kinds[call.kind] += 1
        if call.kind == "refused":
            refusals[re.sub(r"`[^`]*`", "`…`", " ".join(call.why.split()))[:160]] += 1
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return "\n  ".join([f"{kinds.total()} calls: {counts}", *(f"{n} x {why}" for why, n in refusals.most_common())])


def main() -> None:
    """Run the models that the command line names, or all cases, and print a summary."""
    names = sys.argv[1:] or [case.name for case in all_cases() if case.name not in EXCLUDED]
    found: list[Call] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="calls-") as directory:
            export(model := model_of(name), Path(directory, "bundle"))
            own = list(calls(model, Path(directory, "bundle"), SESSIONS))
        found += own
        print(name, summary(own).partition("\n")[0], flush=True)
        for call in own:
            if call.kind == "WRONG":
                print(f"  {call.where}: {call.why}", flush=True)
    print(summary(found))


if __name__ == "__main__":
    main()
