"""The second reader runs the goldens; every rule that recorded calls can show is noticed when it is switched off."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.reader.bundle import Bundle
from tests.reader.interpret import Unread
from tests.reader.replay import Replay
from tests.reader.rules import RULES, Rules

GOLDENS = Path(__file__).parents[1] / "golden/v1.0"
FORMS = ("forward", "functional")
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

NOTICED = {
    "state.pairs": "every_dtype",
    "state.span": "state_layouts",
    "state.shared": "shared_state",
    "call.rebind": "rebound_buffer",
    "graph.kwargs": "arguments",
    "graph.subgraph_inputs": "branches",
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
    "gradient.nondifferentiable": "input_data_mutated",
    "random.order": "unused_draws",
}
"""A golden that notices each rule."""

UNSEEN = {
    "call.symbols": "torch's shape environment has a symbol for a whole size, with factor 1 and offset 0",
    "mutation.recorded": "exporters refuse joint graphs with gradients through a changed input",
    "mutation.no_grad": "what follows such a change has no gradient in a recorded call",
    "output.alias_detached": "the steps of such views detach them already",
    "output.without_tangent": "eager's view has no history, so that no recorded pass begins at it",
    "output.grad_mode": "recorded calls do not note the mode that a call leaves",
    "gradient.undefined": "recorded passes begin at all outputs, so that all tangents are defined",
    "gradient.detached": "recorded calls have no hooks on what made their arguments",
    "gradient.dtype": "autograd converts gradients of returned values itself",
}
"""Rules that no recorded call can show, or none does, each with the reason."""


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Goldens may leave the grad mode switched off."""
    yield
    torch.set_grad_enabled(True)


def replays(golden: str, form: str, rules: Rules) -> Iterator[Replay]:
    """Yield the recorded calls of a golden, each made."""
    root = GOLDENS / golden / "bundle"
    for entry in Bundle(root, rules).manifest["testvectors"]:
        torch.set_grad_enabled(True)
        replay = Replay(root, entry, form, rules)
        replay.run()
        yield replay


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("golden", sorted(path.name for path in GOLDENS.iterdir()))
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_golden_run_by_the_second_reader_gives_what_eager_gave(golden, form):
    if (golden, form) in UNREAD:
        with pytest.raises(Unread) as caught:
            list(replays(golden, form, Rules()))
        assert str(caught.value) == UNREAD[golden, form]
        return
    assert [replay.differences() for replay in replays(golden, form, Rules())] != []
    assert [each for replay in replays(golden, form, Rules()) for each in replay.differences()] == []


def is_noticed(golden: str, rule: str) -> bool:
    """Return whether a recorded call of a golden fails without a rule."""
    for form in FORMS:
        try:
            if any(replay.differences() for replay in replays(golden, form, Rules([rule]))):
                return True
        except Unread:
            continue
        except (RuntimeError, ValueError, TypeError, AssertionError, IndexError):
            return True
    return False


@pytest.mark.parametrize("rule", NOTICED)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_rule_that_is_switched_off_is_noticed(rule):
    assert is_noticed(NOTICED[rule], rule)


def test_every_rule_is_noticed_or_has_a_reason():
    assert {*NOTICED, *UNSEEN} == set(RULES)
    assert set(NOTICED).isdisjoint(UNSEEN)


def test_second_reader_shares_no_code_with_the_product():
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    imports = [node for text in sources for node in ast.walk(ast.parse(text))]
    names = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]

    assert [name for name in names if name.startswith("aotexport")] == []
