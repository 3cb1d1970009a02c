"""The second reader runs the goldens and golden calls; every rule is noticed by one of them when it is taken away."""

import ast
import contextlib
import functools
import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.observe import CALLS, Observer
from tests.golden.places import place
from tests.golden.refuse import CASES, TAKEN, bundle_of, edited_bundle
from tests.reader.bundle import Bundle, Refused
from tests.reader.interpret import CallFails, Unread
from tests.reader.replay import Replay
from tests.reader.rules import RULES, Rule
from tests.reader.trees import CallRefused
from tests.refusals import refusal

HERE = Path(__file__).parent
GOLDENS = {path.parent.name: path for path in sorted((HERE.parent / "golden").glob("v*/*/bundle"))}
FORMS = ("forward", "functional")
MODULES = ("values", "bundle", "interpret", "joint", "functional", "trees", "guards", "replay")
"""The modules of the reader, each after those that it imports."""

NO_GRAPH = (
    "captured_under_autocast",
    "checkpoint_that_reads_state",
    "custom_function_that_writes",
    "input_changed_with_gradients",
    "input_data_replaced",
    "input_storage_replaced",
    "onnx_model",
    "rebound_buffer",
    "sparse_gradient",
    "view_that_comes_to_require_grad",
)
UNREAD: dict[tuple[str, str], str] = {
    **{(name, "functional"): "no functional graph" for name in NO_GRAPH},
    **{
        (name, "functional"): "a soft guard of the functional graph"
        for name in ("selections_of_input", "shared_state", "sizes_that_may_be_zero", "views_of_input")
    },
    ("custom_function_by_the_joint_graph", "forward"): "the forward graph lacks the backward of a function",
    **{("tensor_subclasses", form): "tensor subclasses: their classes are the caller's" for form in FORMS},
}
"""What this reader does not run, each with the reason that it gives."""

OUTPUTS = [
    "output_that_is_a_constant",
    "output_that_is_a_list",
    "joint_output_that_is_a_constant",
    "size_that_is_a_constant_but_no_number",
]
"""Bundles, `golden/refused`, with outputs that are not what the program says."""

GATED = ("version-", "convention-", "extension-", "operator-set-")
"""How the codes begin of what this reader refuses before it reads; it takes the rest of a bundle as valid."""


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    """Goldens may leave the grad mode switched off."""
    yield
    reset()


def reset() -> None:
    """Put grad mode and autocast as they are at first."""
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)


def replays(root: Path, form: str, reader: Any = None) -> Iterator[Any]:
    """Yield the recorded calls of a bundle, each made, by this reader or one without a rule."""
    for entry in json.loads((root / "bundle.json").read_text(encoding="utf-8"))["testvectors"]:
        reset()
        replay = (reader or importlib.import_module("tests.reader.replay")).Replay(root, entry, form)
        replay.run()
        yield replay


@pytest.mark.parametrize("golden", GOLDENS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_golden_run_by_the_second_reader_gives_what_eager_gave(golden):
    for form in FORMS:
        if (golden, form) in UNREAD:
            assert refusal(Unread, list, replays(GOLDENS[golden], form)) == UNREAD[golden, form]
            continue
        differences = [replay.differences() for replay in replays(GOLDENS[golden], form)]
        assert (form, differences) == (form, [[] for _ in differences])
        assert differences


@pytest.mark.parametrize("name", TAKEN)
def test_bundle_that_every_reader_takes_gives_what_eager_gave(name, tmp_path):
    root = edited_bundle(TAKEN[name], tmp_path / name)
    for form in FORMS:
        if TAKEN[name].get("fails"):
            with pytest.raises(CallFails):
                list(replays(root, form))
            continue
        differences = [replay.differences() for replay in replays(root, form)]
        assert (form, differences) == (form, [[] for _ in differences])
        assert differences


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["code"].startswith(GATED)])
def test_bundle_that_needs_another_reader_is_refused(name, tmp_path):
    assert refusal(Refused, Bundle, edited_bundle(CASES[name], tmp_path / name)) == CASES[name]["code"]


@pytest.mark.parametrize("name", [name for name in CASES if "_index_" in name or name in OUTPUTS])
def test_index_that_leads_nowhere_or_output_of_another_kind_is_refused(name, tmp_path):
    with pytest.raises(Refused, match=CASES[name]["code"]):
        list(replays(edited_bundle(CASES[name], tmp_path / name), "forward"))


# --- golden calls -----------------------------------------------------------------------------------------


class Reading:
    """The second reader, as what makes golden calls."""

    def __init__(self, root: Path, program: str, form: str, reader: Any) -> None:
        """Read a program; `form` is the graph that serves, `reader` the module with `Replay`."""
        manifest = json.loads((root / "bundle.json").read_text(encoding="utf-8"))
        entry = next(each for each in manifest["testvectors"] if each["program"] == program)
        self._replay: Replay = reader.Replay(root, entry, form)
        self._shown = {each["name"] for each in manifest.get("state", []) if each["role"] != "constant"}

    def call(self, arguments: dict[str, Any], changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """See `Subject`."""
        paths = [each["path"] for each in self._replay.program["inputs"] if each["kind"] != "state"]
        named = self._replay.named([arguments.pop(path) for path in paths])
        place(named, arguments, changes)
        return self._replay.call(named), named

    def state(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name."""
        return {name: tensor for name, tensor in self._replay.state.items() if name in self._shown}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a parameter."""
        self._replay.module[name] = tensor


def seen_of(case: dict[str, Any], root: Path, form: str, reader: Any = None) -> Observer:
    """Return what is seen of a golden call, made by one of the graphs."""
    reset()
    reader = reader or importlib.import_module("tests.reader.replay")
    return Observer(case, root, Reading(root, case["program"], form, reader))


def bundle_of_call(case: dict[str, Any], directory: Path) -> Path:
    """Return the bundle of a golden call, edited in `directory` if it is."""
    return edited_bundle(case, directory / "bundle") if "edits" in case else bundle_of(case["golden"])


@pytest.mark.parametrize("name", CALLS)
def test_golden_call_of_the_second_reader_shows_what_eager_showed_by_the_graph_that_it_names(name, tmp_path):
    case = CALLS[name]
    root = bundle_of_call(case, tmp_path)
    forward, functional = (seen_of(case, root, form) for form in FORMS)
    if case["graph"] == "refused":
        assert [type(seen.error) for seen in (forward, functional)] == [CallRefused, CallRefused]
        return
    assert forward.differences(case) == []
    if case["graph"] == "forward":
        assert isinstance(functional.error, Unread)
    elif case["rule"] == "10.21":
        # This reader refuses to record a backward of the backward.
        assert str(functional.error) == "a backward of the backward is not recorded"
    else:
        assert functional.differences(case) == []


# --- rules that are taken away ----------------------------------------------------------------------------


@functools.cache
def code_of(name: str, old: str = "", new: str = "") -> types.CodeType:
    """Return a module of the reader, compiled, with a text replaced that it has once."""
    path = HERE / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    assert not old or source.count(old) == 1
    return compile(source.replace(old, new) if old else source, path, "exec")


@contextlib.contextmanager
def without(rule: Rule | None) -> Iterator[Any]:
    """Give the module `replay` of a reader without a rule; None: of the whole reader."""
    made = {f"tests.reader.{name}": types.ModuleType(f"tests.reader.{name}") for name in MODULES}
    kept = {name: sys.modules[name] for name in made}
    sys.modules.update(made)
    try:
        for name in MODULES:
            module = made[f"tests.reader.{name}"]
            module.__file__ = str(HERE / f"{name}.py")
            is_edited = rule is not None and rule.file == name
            exec(code_of(name, rule.old, rule.new) if is_edited else code_of(name), module.__dict__)
        yield made["tests.reader.replay"]
    finally:
        sys.modules.update(kept)


def outcome(by: str, root: Path, form: str, reader: Any) -> Any:
    """Return what a reader makes, by one graph, of the data that notices a rule: differences or the error."""
    kind, _, name = by.partition(":")
    try:
        if kind != "call":
            return [replay.differences() for replay in replays(root, form, reader)]
        seen = seen_of(CALLS[name], root, form, reader)
        differences = seen.differences(CALLS[name]) if "facts" in CALLS[name] else []
        return [type(getattr(seen, "error", None)).__name__, *differences]
    except Exception as error:
        return type(error).__name__


@functools.cache
def whole_outcome(by: str, root: Path, form: str) -> Any:
    """Return the outcome of the whole reader."""
    with without(None) as reader:
        return outcome(by, root, form, reader)


def bundle_that_notices(by: str, directory: Path) -> Path:
    """Return the bundle of what notices a rule, edited in `directory` if it is."""
    kind, _, name = by.partition(":")
    if kind == "golden":
        return GOLDENS[name]
    if kind == "call":
        return bundle_of_call(CALLS[name], directory)
    return edited_bundle((TAKEN if kind == "taken" else CASES)[name], directory / "bundle")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.number}-{rule.says.replace(' ', '_')}-{rule.by}")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_rule_that_is_taken_away_is_noticed(rule, tmp_path):
    root = bundle_that_notices(rule.by, tmp_path)
    forms = FORMS[::-1] if rule.file in ("functional", "joint") else FORMS
    with without(rule) as reader:
        noticed = (outcome(rule.by, root, form, reader) != whole_outcome(rule.by, root, form) for form in forms)
        assert any(noticed)


def test_second_reader_shares_no_code_with_the_product():
    sources = [path.read_text(encoding="utf-8") for path in HERE.glob("*.py")]
    imports = [node for text in sources for node in ast.walk(ast.parse(text))]
    names = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    assert [name for name in names if name.startswith("aotexport")] == []
