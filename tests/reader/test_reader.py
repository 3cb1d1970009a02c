"""The second reader runs the goldens; every rule that recorded calls can show is noticed when it is switched off."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.cases import CASES as MODELS
from tests.golden.refuse import CASES, TAKEN, edited_bundle
from tests.reader.bundle import Bundle, Refused
from tests.reader.interpret import CallFails, Unread
from tests.reader.observations import (
    Call,
    backward_after_a_change,
    gradients_of_returned_views,
    mode_that_is_left,
    rises_of_versions,
    visits_of_producers,
)
from tests.reader.replay import Replay
from tests.reader.rules import RULES, Rules

GOLDENS = {path.parent.name: path for path in sorted((Path(__file__).parents[1] / "golden").glob("v*/*/bundle"))}
FORMS = ("forward", "functional")
Observe = Callable[[Call, list[Any]], Any]
UNREAD: dict[tuple[str, str], str] = {
    **{(name, "functional"): "no functional graph" for name in ("captured_under_autocast", "input_storage_replaced")},
    **{(name, "functional"): "no functional graph" for name in ("onnx_model", "rebound_buffer", "sparse_gradient")},
    **{
        (name, "functional"): "a soft guard of the functional graph" for name in ("selections_of_input", "shared_state")
    },
    ("views_of_input", "functional"): "a soft guard of the functional graph",
    ("custom_function_by_the_joint_graph", "forward"): "the forward graph lacks the backward of a function",
    **{("tensor_subclasses", form): "tensor subclasses: their classes are the caller's" for form in FORMS},
}
"""What this reader does not run, each with the reason that it gives."""

BY_EDITS = {
    "call.symbols": "size_that_is_read_by_factor_and_offset",
    "body.slices": "map_over_tensors_of_two_sizes",
}
"""A bundle of edits, `golden/taken`, that notices each rule that no golden does."""

BY_REFUSAL = {"version.must_understand": "extension_that_no_reader_may_skip"}
"""A bundle that is refused, `golden/refused`, by each rule that no recorded call shows."""

BY_REFUSED_CALLS = {"graph.dtype": "result_of_another_dtype_than_its_arguments"}
"""A bundle, `golden/refused`, of which a call is refused by each rule that this reader follows when it computes."""

OUTPUTS = [
    "output_that_is_a_constant",
    "output_that_is_a_list",
    "joint_output_that_is_a_constant",
    "size_that_is_a_constant_but_no_number",
]
"""Bundles, `golden/refused`, with outputs that are not what the program says."""

GATED = ("version-", "convention-", "extension-", "operator-set-")
"""How the codes begin of what this reader refuses before it reads; it takes the rest of a bundle as valid."""

NOTICED = {
    "state.pairs": "every_dtype",
    "state.span": "state_layouts",
    "state.shared": "shared_state",
    "call.rebind": "rebound_buffer",
    "graph.kwargs": "arguments",
    "graph.subgraph_inputs": "branches",
    "graph.tables": "tables_of_branches",
    "effect.grad_mode": "regions",
    "effect.autocast": "regions",
    "body.cond": "branches",
    "body.cond_zeros": "branch_that_uses_one_operand",
    "body.loop_gradients": "loop_that_cuts_gradients",
    "body.hook": "tensor_hook",
    "mutation.data": "input_data_mutated",
    "mutation.metadata": "input_metadata_mutated",
    "output.input": "output_is_input",
    "output.alias": "strided_view_of_input",
    "output.alias_detached": "detached_item_of_input",
    "output.without_tangent": "view_under_no_grad_of_intermediate",
    "gradient.nondifferentiable": "input_data_mutated",
    "gradient.undefined": "inputs_changed_under_no_grad",
    "random.order": "unused_draws",
    "vector.generated": "generated_arguments",
}
"""A golden that notices each rule."""

OBSERVED = {
    "output.alias_through": ("view_of_returned_view", gradients_of_returned_views),
    "output.grad_mode": ("grad_mode_left_off", mode_that_is_left),
    "gradient.detached": ("outputs_without_gradient", visits_of_producers),
    "gradient.checks": ("results_that_rely_on_different_inputs", backward_after_a_change),
    "mutation.versions": ("input_data_mutated", rises_of_versions),
}
"""A golden, and what a caller sees of it, that notice each rule which is beyond what recorded calls note."""

UNSEEN = {
    "mutation.recorded": "exporters refuse joint graphs with gradients through a changed input; others have none",
    "mutation.no_grad": "the graph's gradient of the new value is the incoming one, as if nothing had been recorded",
    "gradient.dtype": "autograd converts gradients of returned values itself",
}
"""Rules that no recorded call can show, or none does, each with the reason."""


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Goldens may leave the grad mode switched off."""
    yield
    torch.set_grad_enabled(True)


def replays(root: Path, form: str, rules: Rules) -> Iterator[Replay]:
    """Yield the recorded calls of a bundle, each made."""
    for entry in Bundle(root, rules).manifest["testvectors"]:
        torch.set_grad_enabled(True)
        replay = Replay(root, entry, form, rules)
        replay.run()
        yield replay


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("golden", GOLDENS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_golden_run_by_the_second_reader_gives_what_eager_gave(golden, form):
    if (golden, form) in UNREAD:
        with pytest.raises(Unread) as caught:
            list(replays(GOLDENS[golden], form, Rules()))
        assert str(caught.value) == UNREAD[golden, form]
        return
    differences = [replay.differences() for replay in replays(GOLDENS[golden], form, Rules())]
    assert differences == [[] for _ in differences] != []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TAKEN)
def test_bundle_that_every_reader_takes_gives_what_eager_gave(name, form, tmp_path):
    root = edited_bundle(TAKEN[name], tmp_path / name)

    if TAKEN[name].get("fails"):
        with pytest.raises(CallFails):
            list(replays(root, form, Rules()))
        return
    differences = [replay.differences() for replay in replays(root, form, Rules())]
    assert differences == [[] for _ in differences] != []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["code"].startswith(GATED)])
def test_bundle_that_needs_another_reader_is_refused(name, tmp_path):
    with pytest.raises(Refused) as caught:
        Bundle(edited_bundle(CASES[name], tmp_path / name), Rules())

    assert str(caught.value) == CASES[name]["code"]


@pytest.mark.parametrize("name", [name for name in CASES if "_index_" in name or name in OUTPUTS])
def test_index_that_leads_nowhere_or_output_of_another_kind_is_refused(name, tmp_path):
    with pytest.raises(Refused, match=CASES[name]["code"]):
        list(replays(edited_bundle(CASES[name], tmp_path / name), "forward", Rules()))


def is_noticed(root: Path, rule: str) -> bool:
    """Return whether a recorded call of a bundle fails without a rule."""
    for form in FORMS:
        try:
            if any(replay.differences() for replay in replays(root, form, Rules([rule]))):
                return True
        except Unread:
            continue
        except (Refused, RuntimeError, ValueError, TypeError, AssertionError, IndexError):
            return True
    return False


@pytest.mark.parametrize("rule", NOTICED)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_rule_that_is_switched_off_is_noticed(rule):
    assert is_noticed(GOLDENS[NOTICED[rule]], rule)


def observed(golden: str, form: str, rules: Rules, observe: Observe) -> Any:
    """Return what a caller sees of the first recorded call of a golden."""
    root = GOLDENS[golden]
    torch.set_grad_enabled(True)
    replay = Replay(root, Bundle(root, rules).manifest["testvectors"][0], form, rules)
    return observe(replay.call, replay.arguments()[0])


@pytest.mark.parametrize("rule", OBSERVED)
def test_what_a_caller_sees_is_as_in_eager_and_notices_a_rule_that_is_switched_off(rule):
    golden, observe = OBSERVED[rule]
    case = MODELS[golden]()
    eager = observe(lambda arguments: leaves_of(case.model(*arguments)), list(case.args))

    assert observed(golden, "forward", Rules(), observe) == eager
    assert observed(golden, "functional", Rules(), observe) == eager
    assert observed(golden, "functional", Rules([rule]), observe) != eager


def leaves_of(result: Any) -> list[Any]:
    """Return the tensors and numbers of a result of eager, in the order of `Program.outputs`."""
    return [result] if isinstance(result, torch.Tensor) else [each for each in result if each is not None]


@pytest.mark.parametrize("rule", BY_EDITS)
def test_rule_that_is_switched_off_is_noticed_by_a_bundle_of_edits(rule, tmp_path):
    case = TAKEN[BY_EDITS[rule]]
    root = edited_bundle(case, tmp_path / "bundle")
    if not case.get("fails"):
        assert is_noticed(root, rule)
        return
    # What fails by a rule runs without it.
    assert list(replays(root, "forward", Rules([rule]))) != []


@pytest.mark.parametrize("rule", BY_REFUSAL)
def test_rule_of_refusal_that_is_switched_off_lets_the_bundle_in(rule, tmp_path):
    Bundle(edited_bundle(CASES[BY_REFUSAL[rule]], tmp_path / "bundle"), Rules([rule]))


def test_constant_for_a_tensor_is_returned_without_the_rule_of_outputs(tmp_path):
    root = edited_bundle(CASES["output_that_is_a_constant"], tmp_path / "bundle")
    rules = Rules(["graph.outputs"])

    replay = Replay(root, Bundle(root, rules).manifest["testvectors"][0], "forward", rules)
    assert replay.call(replay.arguments()[0]) == [3]


@pytest.mark.parametrize("rule", BY_REFUSED_CALLS)
def test_rule_of_refusal_that_is_switched_off_lets_the_call_run(rule, tmp_path):
    root = edited_bundle(CASES[BY_REFUSED_CALLS[rule]], tmp_path / "bundle")

    with pytest.raises(Refused, match="result-type"):
        list(replays(root, "functional", Rules()))
    assert [replay.differences() for replay in replays(root, "functional", Rules([rule]))] == [[], []]


def test_every_rule_is_noticed_or_has_a_reason():
    known = [*NOTICED, *BY_EDITS, *BY_REFUSAL, *BY_REFUSED_CALLS, *OBSERVED, *UNSEEN, "graph.outputs"]
    assert sorted(known) == sorted(RULES)


def test_second_reader_shares_no_code_with_the_product():
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    imports = [node for text in sources for node in ast.walk(ast.parse(text))]
    names = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]

    assert [name for name in names if name.startswith("aotexport")] == []
