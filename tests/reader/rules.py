"""The rules that can be switched off, and the one that a replay breaks."""

from __future__ import annotations

from collections.abc import Collection

RULES: dict[str, str] = {
    "version.must_understand": "section 3: a reader refuses extensions that it may not skip",
    "state.pairs": "section 4, rule 1: complex tensors are stored as pairs",
    "state.span": "section 4, rule 3: a tensor that is not whole is part of a span",
    "state.shared": "section 4: entries of one key share memory",
    "call.symbols": "section 8, step 3: (what is read - offset) / factor",
    "call.rebind": "section 8, step 7: an output becomes the module's tensor for later calls",
    "graph.kwargs": "section 7: keyword arguments are passed by name",
    "graph.subgraph_inputs": "section 7: a body sees its own inputs",
    "effect.grad_mode": "section 7: `set_grad_enabled` switches recording",
    "effect.autocast": "section 7: `enter_autocast` begins a region of mixed precision",
    "body.cond": "section 7: `cond` runs the branch of its predicate",
    "body.cond_zeros": "section 7: every operand of `cond` that requires grad gets a gradient",
    "body.loop_gradients": "section 7: loops pass gradients for carried values that required grad at the start",
    "body.hook": "section 7: `register_hook` registers its body",
    "mutation.data": "section 10, epilogue 1: elements are overwritten",
    "mutation.metadata": "section 10, epilogue 1: sizes, strides, offset change",
    "mutation.recorded": "section 10, epilogue 1: the input has the history of its new value",
    "mutation.no_grad": "section 10, epilogue 1: not recorded if `under_no_grad`",
    "output.input": "section 10, epilogue 2: the very tensor of an input",
    "output.alias": "section 10, epilogue 2: an alias is made anew from its base",
    "output.alias_detached": "section 10, epilogue 2, rule 2: detached unless it requires grad",
    "output.without_tangent": "section 10: an output with `requires_grad` and no tangent requires grad all the same",
    "output.grad_mode": "section 10, epilogue 3: the grad mode that a call leaves",
    "gradient.nondifferentiable": "section 10: values without a tangent are not differentiable",
    "gradient.undefined": "section 10: an undefined tangent is no zeros",
    "gradient.detached": "section 10: inputs whose producers autograd must not visit",
    "gradient.dtype": "section 10: a tangent is converted to the dtype of its metadata",
    "random.order": "section 7: random nodes run also where nothing uses them",
}
"""Name of each rule, and what it says."""


class Rules:
    """The rules that hold in a replay."""

    def __init__(self, off: Collection[str] = ()) -> None:
        """Switch off the rules named in `off`."""
        assert set(off) <= set(RULES)
        self._off = frozenset(off)

    def __call__(self, name: str) -> bool:
        """Return whether rule `name` holds."""
        assert name in RULES, name
        return name not in self._off
