"""The rules that can be switched off, and the one that a replay breaks."""

from __future__ import annotations

from collections.abc import Collection

RULES: dict[str, str] = {
    "version.must_understand": "3.5: a reader refuses extensions that it may not skip",
    "state.pairs": "4.6: complex tensors are stored as pairs",
    "state.span": "4.8: a tensor that is not whole is part of a span",
    "state.shared": "4.9: entries of one key share memory",
    "call.symbols": "8.4: (what is read - offset) / factor",
    "call.rebind": "8.8: an output becomes the module's tensor for later calls",
    "graph.kwargs": "7.3: keyword arguments are passed by name",
    "graph.outputs": "7.4: outputs are tensors where the program says so, and numbers elsewhere",
    "graph.subgraph_inputs": "7.14: a body sees its own inputs",
    "graph.dtype": "7.31: metadata have the dtype that the operator gives",
    "graph.tables": "7.32: a body has tables of its own",
    "effect.grad_mode": "7.9: `set_grad_enabled` switches recording",
    "effect.autocast": "7.9: `enter_autocast` begins a region of mixed precision",
    "body.cond": "7.14: `cond` runs the branch of its predicate",
    "body.cond_zeros": "7.15: every operand of `cond` that requires grad gets a gradient",
    "body.loop_gradients": "7.16: loops pass gradients for carried values that required grad at the start",
    "body.slices": "7.14: a call over no slices, or of several sizes, fails",
    "body.hook": "7.19: `register_hook` registers its body",
    "mutation.data": "10.8: elements are overwritten",
    "mutation.metadata": "10.7: sizes, strides, offset change",
    "mutation.versions": "10.9: by how much versions rise",
    "mutation.recorded": "10.8: the input has the history of its new value",
    "mutation.no_grad": "10.8: not recorded if `under_no_grad`",
    "output.input": "10.11: the very tensor of an input",
    "output.alias": "10.12: an alias is made anew from its base",
    "output.alias_detached": "10.13: detached unless it requires grad",
    "output.alias_through": "10.14: an alias of an alias is made of it",
    "output.without_tangent": "10.10: an output with `requires_grad` and no tangent requires grad all the same",
    "output.grad_mode": "10.16: the grad mode that a call leaves",
    "gradient.nondifferentiable": "10.17: values without a tangent are not differentiable",
    "gradient.undefined": "10.22: an undefined tangent is no zeros",
    "gradient.checks": "10.20: backward raises where a tensor that eager reads was changed",
    "gradient.detached": "10.5: inputs whose producers autograd must not visit",
    "gradient.dtype": "10.18: a tangent is converted to the dtype of its metadata",
    "vector.generated": "11.11: floats of an argument are made by a generator",
    "random.order": "7.13: random nodes run also where nothing uses them",
}
"""Name of each rule, as `schemas/README.md` has it, with its number there and what it says."""


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
