"""Each pass on a small graph: text in, text out."""

import textwrap
from dataclasses import replace

import pytest
import torch

from aotexport.capture.passes import order
from aotexport.capture.passes.contract import Draft, Fact, graph_pass, ordered
from aotexport.capture.passes.order import draft_text, passes_dumped, program_dumped
from aotexport.errors import ExportFailed
from aotexport_runtime.errors import ArgumentInvalid
from tests.unit.exporter.graph_text import parse_draft


def _expect(draft: Draft, text: str) -> None:
    draft.graph.graph.lint()
    assert draft_text(draft) == textwrap.dedent(text).lstrip("\n")


_EVERYTHING = """
    reads autocast grad_mode
    %x : float32[2, 3] requires_grad = argument 0
    %w : float32[3, 3] requires_grad = state linear.weight
    %p : bool[] = argument 1
    %u : float32[2] = state scale and argument 2
    %mm : float32[2, 3] = aten.mm.default(%x, %w)
    %c : float32[3] = attribute c
    %add : float32[2, 3] = aten.add.Tensor(%mm, %c, alpha=2)
    %to : float64[2, 3] = aten._to_copy.default(%add, dtype=torch.float64)
    %pair : (float64[2], int64[2]) = aten.max.dim(%to, 1)
    %largest : float64[2] = _operator.getitem(%pair, 0)
    %then = attribute then
        %a : float32[2, 3]
        %mul : float32[2, 3] = aten.mul.Tensor(%a, 2.0)
        return %mul
    %cond = higher_order.cond(%p, %then, %then, [%x])
    %end = torch._C._set_grad_enabled(True) #restores_ambient_grad_mode
    %nonzero : int64[u0, 1] = aten.nonzero.default(%u)
    %size : SymInt u0 = aten.sym_size.int(%nonzero, 0)
    return %largest, None, %size
"""


def test_text_of_a_draft_gives_the_same_draft():
    _expect(parse_draft(_EVERYTHING), _EVERYTHING)


# --- the contract ---------------------------------------------------------------------------------------


@graph_pass(guarantees=[Fact.CODE_USED], only_grad=True)
def _uses_code_of_gradients(draft: Draft) -> Draft:
    return draft


@graph_pass(requires=[Fact.CODE_USED])
def _needs_used_code(draft: Draft) -> Draft:
    return draft


def test_order_without_what_a_pass_requires_is_refused():
    with pytest.raises(ValueError, match="`_needs_used_code` requires that every node is used"):
        ordered(_needs_used_code, order.eliminate_dead_code)


def test_order_that_guarantees_for_programs_with_gradients_alone_is_refused():
    with pytest.raises(ValueError, match="`_needs_used_code` requires"):
        ordered(_uses_code_of_gradients, _needs_used_code)


def test_passes_have_an_order_and_names_of_their_own():
    assert ordered(*order.PASSES) == order.PASSES
    assert len({each.name for each in order.PASSES}) == len(order.PASSES)


def test_passes_for_gradients_run_for_programs_with_gradients_alone():
    text = """
    %x : float32[2] requires_grad = argument 0
    %body = attribute body
        %a : float32[2]
        return %a
    %loop = higher_order.while_loop(%body, %body, [%x], [])
    return %loop
    """
    assert order.run_passes(parse_draft(text)).reads == frozenset()
    assert order.run_passes(parse_draft(text, grad=True)).reads == {"requires_grad"}


# --- passes that change graphs --------------------------------------------------------------------------

CHANGED = {
    "constants of subgraphs become operands": (
        [order.lift_subgraph_constants],
        """
        %p : bool[] = argument 0
        %x : float32[2] = argument 1
        %then = attribute then
            %a : float32[2]
      -     %two : float32[] = attribute two
      -     %mul : float32[2] = aten.mul.Tensor(%a, %two)
      +     %constant_2 : float32[]
      +     %mul : float32[2] = aten.mul.Tensor(%a, %constant_2)
            return %mul
        %other = attribute other
            %a : float32[2]
      +     %constant_2 : float32[]
            return %a
      - %cond = higher_order.cond(%p, %then, %other, [%x])
      + %_subgraph_constant0 : float32[] = attribute _subgraph_constant0
      + %cond = higher_order.cond(%p, %then, %other, [%x, %_subgraph_constant0])
        return %cond
        """,
    ),
    "constants of subgraphs of subgraphs become operands of both": (
        [order.lift_subgraph_constants],
        """
        %p : bool[] = argument 0
        %x : float32[2] = argument 1
        %then = attribute then
            %q : bool[]
            %a : float32[2]
      +     %constant_3 : float32[]
            %inner = attribute inner
                %b : float32[2]
      -         %two : float32[] = attribute two
      -         %mul : float32[2] = aten.mul.Tensor(%b, %two)
      +         %constant_2 : float32[]
      +         %mul : float32[2] = aten.mul.Tensor(%b, %constant_2)
                return %mul
      -     %nested = higher_order.cond(%q, %inner, %inner, [%a])
      +     %nested = higher_order.cond(%q, %inner, %inner, [%a, %constant_3])
            return %nested
        %other = attribute other
            %q : bool[]
            %a : float32[2]
      +     %constant_3 : float32[]
            return %a
      - %cond = higher_order.cond(%p, %then, %other, [%p, %x])
      + %_subgraph_constant0 : float32[] = attribute _subgraph_constant0
      + %cond = higher_order.cond(%p, %then, %other, [%p, %x, %_subgraph_constant0])
        return %cond
        """,
    ),
    "regions restore the mode of the caller, and others their own": (
        [order.make_grad_modes_relative],
        """
        %x : float32[2] = argument 0
      + %is_grad_enabled : bool True = torch.is_grad_enabled()
        %off = torch._C._set_grad_enabled(False)
        %sin : float32[2] = aten.sin.default(%x)
        %on = torch._C._set_grad_enabled(True)
      - %back = torch._C._set_grad_enabled(True) #restores_ambient_grad_mode
      + %back = torch._C._set_grad_enabled(%is_grad_enabled) #restores_ambient_grad_mode
        return %sin
        """,
    ),
    "assumed numbers are checked, and their checks outlive dead code": (
        [order.insert_data_checks, order.eliminate_dead_code],
        """
        %x : float32[4] = argument 0
        %nonzero : int64[u0, 1] = aten.nonzero.default(%x)
      - %third : int64[1] = aten.select.int(%nonzero, 0, 2)
      + %sym_size_int : SymInt u0 = aten.sym_size.int(%nonzero, 0)
      + %ge : SymBool u0 >= 0 = _operator.ge(%sym_size_int, 0)
      + %_assert_scalar_default = aten._assert_scalar.default(%ge, 'the program needs `value >= 0` ONLY')
      + %le : SymBool u0 <= 4 = _operator.le(%sym_size_int, 4)
      + %_assert_scalar_default_1 = aten._assert_scalar.default(%le, 'the program needs `value <= 4` ONLY')
        return %x
        """.replace("ONLY", "of a number that only the data know"),
    ),
    "a graph without such numbers gets no checks": (
        [order.insert_data_checks],
        """
        %x : float32[4] = argument 0
        %sin : float32[4] = aten.sin.default(%x)
        return %sin
        """,
    ),
    "dead code goes, and effects stay": (
        [order.eliminate_dead_code],
        """
        %x : float32[2] = argument 0
        %w : float32[2] = state weight
      - %c : float32[2] = attribute c
      - %sin : float32[2] = aten.sin.default(%x)
      - %pair : (float32[], int64[]) = aten.max.dim(%sin, 0)
      - %unused : float32[] = _operator.getitem(%pair, 0)
        %written : float32[2] = aten.add_.Tensor(%w, 1)
        %drawn : float32[2] = aten.rand_like.default(%x)
        %dropped : float32[2] = aten.dropout.default(%x, 0.5, True)
        %off = torch._C._set_grad_enabled(False)
        return %x
        """,
    ),
    "unused state goes, and unused arguments stay": (
        [order.drop_unused_state],
        """
      - %w : float32[2] = state weight
        %b : float32[2] = state bias
        %s : float32[2] = state scale and argument 1
        %x : float32[2] = argument 0
        %add : float32[2] = aten.add.Tensor(%b, %b)
        return %add
        """,
    ),
}


@pytest.mark.parametrize(("passes", "difference"), CHANGED.values(), ids=CHANGED)
def test_pass_changes_lines_of_a_graph_and_leaves_the_others(passes, difference):
    lines = difference.strip("\n").rstrip().splitlines()
    draft = parse_draft("\n".join(line[8:] for line in lines if line[6] != "+"))
    for each in passes:
        draft = each.run(draft)
    _expect(draft, "\n".join(line[8:] for line in lines if line[6] != "-") + "\n")
    assert len(draft.inputs) == sum(" = argument" in line or " = state" in line for line in lines if line[6] != "-")


def test_constants_become_state_and_inputs_once_each():
    draft = parse_draft("""
    %w : float32[2] = state weight
    %x : float32[2] = argument 0
    %one : float32[2] = attribute table
    %again : float32[2] = attribute table
    %known : float32[2] = attribute own_weight
    %add : float32[2] = aten.add.Tensor(%x, %one)
    %mul : float32[2] = aten.mul.Tensor(%add, %again)
    %sub : float32[2] = aten.sub.Tensor(%mul, %known)
    return %sub
    """)
    draft.graph.own_weight = draft.state[0].tensor
    table = draft.graph.table
    draft = order.lift_constants.run(draft)
    _expect(
        draft,
        """
        %w : float32[2] = state weight
        %x : float32[2] = argument 0
        %constant_0 : float32[2] = state constant.0
        %add : float32[2] = aten.add.Tensor(%x, %constant_0)
        %mul : float32[2] = aten.mul.Tensor(%add, %constant_0)
        %sub : float32[2] = aten.sub.Tensor(%mul, %w)
        return %sub
        """,
    )
    assert [entry.tensor for entry in draft.state[1:]] == [table]


# --- passes that refuse ---------------------------------------------------------------------------------

_HOOK = """
    %w : float32[2] requires_grad = state weight
    %x : float32[2] requires_grad = argument 0
    %sin : float32[2] = aten.sin.default(%x)
    %body = attribute body
        %g : float32[2]
        return %g
    %hook = aotexport.capture.effects.hooks.apply_hook(%body, %NAME, [])
    return %sin, %w
"""
_STATE = """
    %w : float32[2] = state weight
    %v : float32[2] = state view
    %mul : float32[2] = aten.mul.Tensor(%w, %v)
    return %mul
"""
_NESTED = """
    %p : bool[] = argument 0
    %x : float32[2] requires_grad = argument 1
    %outer = attribute outer
        %q : bool[]
        %a : float32[2]
        %inner = attribute inner
            %b : float32[2]
            %DRAW
            return %drawn
        %cond = higher_order.cond(%q, %inner, %inner, [%a])
        return %cond
    %cond = higher_order.cond(%p, %outer, %outer, [%p, %x])
    return %cond
"""
_DRAW, _SINE = "%drawn : float32[2] = aten.rand_like.default(%b)", "%drawn : float32[2] = aten.sin.default(%b)"
_DRAWING = _NESTED.replace("%DRAW", _DRAW)


def _set(draft, places, **values):
    for name, value in values.items():
        setattr(places, name, value)
    return draft


def _recorded(viewed, recorded):
    def change(draft):
        tensors = [entry.tensor for entry in draft.state]
        draft = _set(draft, draft.state[1], tensor=tensors[0].view(2) if viewed else tensors[1])
        return replace(draft, recorded=draft.state[:recorded])

    return change


@pytest.mark.parametrize(
    ("each", "text", "change", "message"),
    [
        (
            order.lift_constants,
            "%x : float32[2] = argument 0\n%hidden : float32[2] = attribute hidden\nreturn %hidden\n",
            lambda draft: _set(draft, draft.graph, hidden=draft.inputs[0]),
            "a tensor whose making the trace does not show",
        ),
        (order.refuse_hooks_on_state, _HOOK.replace("NAME", "x"), None, None),
        (order.refuse_hooks_on_state, _HOOK.replace("NAME", "sin"), None, None),
        (order.refuse_hooks_on_state, _HOOK.replace("NAME", "w"), None, "registers a hook on its own `weight` in the"),
        (
            order.refuse_computed_state,
            _STATE,
            lambda draft: _set(draft, draft.state[0], tensor=torch.ones(2, requires_grad=True).exp()),
            "`weight` was computed from other tensors before the call",
        ),
        (
            order.refuse_computed_state,
            _STATE,
            lambda draft: _set(draft, draft.state[0].tensor, requires_grad=True),
            None,
        ),
        (
            order.refuse_history_by_views,
            _STATE,
            _recorded(viewed=True, recorded=1),
            "writes values that require grad to `weight`, and uses `view`",
        ),
        (order.refuse_history_by_views, _STATE, _recorded(viewed=False, recorded=1), None),
        (order.refuse_history_by_views, _STATE, _recorded(viewed=True, recorded=0), None),
        (order.refuse_nested_draws, _DRAWING, None, "`cond` inside of `cond` draws random numbers on the way to grad"),
        (order.refuse_nested_draws, _NESTED.replace("%DRAW", _SINE), None, None),
        (order.refuse_nested_draws, _DRAWING.replace(" requires_grad", ""), None, None),
        (order.fix_gradients_of_loops, _DRAWING, None, None),
    ],
)
def test_pass_refuses_a_graph_or_leaves_it_as_it_is(each, text, change, message):
    draft = parse_draft(text, grad=True)
    draft = change(draft) if change else draft
    if message is None:
        _expect(each.run(draft), text)
    else:
        with pytest.raises(ExportFailed, match=message):
            each.run(draft)


# --- what gradients of loops ask of arguments -----------------------------------------------------------

_LOOP = """
    %x : float32[2] requires_grad = argument 0
    %cond = attribute cond
        %a : float32[2]
        %any_1 : bool[] = aten.any.default(%a)
        return %any_1
    %body = attribute body
        %b : float32[2]
        %DRAW
        return %drawn
    %loop = higher_order.while_loop(%cond, %body, [%x], [])
    return %loop
"""


@pytest.mark.parametrize(
    ("draw", "requires_grad", "reads"),
    [(_SINE, True, "reads requires_grad"), (_DRAW, True, "reads layout requires_grad"), (_DRAW, False, "")],
)
def test_gradients_through_loops_are_held_to_what_their_backward_asks(draw, requires_grad, reads):
    text = _LOOP.replace("%DRAW", draw).replace(" requires_grad", " requires_grad" * requires_grad)
    after = text if not reads else f"\n    {reads}{text}"
    _expect(order.fix_gradients_of_loops.run(parse_draft(text, grad=True)), after)


# --- files of graphs ------------------------------------------------------------------------------------

_KEPT = """
    %x : float32[2] = argument 0
    %w : float32[2] = state weight
    return %x
"""


def test_dump_writes_the_graph_after_each_pass_of_the_program(tmp_path):
    with passes_dumped(tmp_path / "made"), program_dumped("infer"):
        order.run_passes(parse_draft(_KEPT))
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.txt"))
    assert files == ["made/infer/00-traced.txt"] + [
        f"made/infer/{number:02}-{each.name}.txt" for number, each in enumerate(order.PASSES, 1) if not each.only_grad
    ]
    (kept,) = (tmp_path / "made/infer").glob("*-eliminate_dead_code.txt")
    (dropped,) = (tmp_path / "made/infer").glob("*-drop_unused_state.txt")
    assert kept.read_text() == textwrap.dedent(_KEPT).lstrip()
    assert "%w" not in dropped.read_text()


def test_dump_of_a_trace_that_is_refused_ends_before_the_refusal_and_replaces_others(tmp_path):
    with passes_dumped(tmp_path):
        order.run_passes(parse_draft(_KEPT))
        with pytest.raises(ExportFailed):
            order.run_passes(parse_draft(_HOOK.replace("NAME", "w")))
    names = sorted(path.name for path in tmp_path.iterdir())
    before = [each.name for each in order.PASSES].index("refuse_hooks_on_state")
    assert len(names) == 1 + before


def test_dump_to_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArgumentInvalid, match="`dump_passes` must be a directory"), passes_dumped(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with passes_dumped(None), program_dumped("infer"):
        order.run_passes(parse_draft(_KEPT))
    assert not list(tmp_path.iterdir())
