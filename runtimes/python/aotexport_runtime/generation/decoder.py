"""The steps of a generation: calls of `decode`, whose keys and values stay in place from token to token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional

from aotexport_runtime.call.plan import Plan
from aotexport_runtime.engines.candidates import AUTOGRAD, PORTABLE
from aotexport_runtime.engines.forward.engine import ForwardEngine
from aotexport_runtime.execution.codegen import CALL_SUBMODULE, Environment, Function, compile_graph
from aotexport_runtime.execution.matmul.onednn import packed, product
from aotexport_runtime.guards.signature import Bound
from aotexport_runtime.rewrite.decoding import Decoding, decoding, is_product, slot_of
from aotexport_runtime.rewrite.layers import is_float32
from aotexport_runtime.rewrite.names import names_in, operands
from aotexport_runtime.rewrite.patterns import ATTENTION, NORM, shape_of
from aotexport_runtime.schema.values import TensorMeta, ValueMeta

Decode = Callable[..., tuple[torch.Tensor, Any]]

_WORTH_PACKING = 16
"""Least steps in which packed weights save the time that packing takes."""


class Decoder:
    """Calls `decode` of a loaded bundle: by a graph that fills slots of caches where it can, else as it is."""

    def __init__(self, module: Any, decode: Decode, most: int) -> None:
        """Take a module, its `decode`, and how many tokens follow at most."""
        self._module, self._decode, self._most = module, decode, most
        self._begun = False
        self._steps: _Steps | None = None

    def __call__(self, tokens: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Return the scores of the token after `tokens`, (batch, 1), and what the next call takes for its cache."""
        if not self._begun:
            self._begun, self._steps = True, _begun(self._module, tokens, mask, cache, self._most)
        if self._steps is None:
            return self._decode(tokens, mask, cache)
        return self._steps.advance(tokens, mask), None


@dataclass(frozen=True)
class _Step:
    """A compiled step.

    Attributes:
        run: computes the scores from the graph's inputs and the caches with a free place.
        past: symbol of the length of the caches.
        most: the greatest such length; None: there is none.
        grows: indices of the inputs that are caches which grow, those of a shape together.
        read: those of them whose own tensor is read too.
        turned: indices of the inputs of which the step takes the transpose too, as second operand of products.
        factors: indices of the inputs that it takes as such once more.
        calls_user: whether it calls submodules that are not the bundle's.
    """

    run: Function
    past: str
    most: int | None
    grows: tuple[tuple[int, ...], ...]
    read: frozenset[int]
    turned: tuple[int, ...]
    factors: tuple[int, ...]
    calls_user: bool


class _Steps:
    """Steps over buffers that have a place for every token."""

    def __init__(self, step: _Step, bound: Bound, places: Sequence[int], most: int) -> None:
        self._step, self._inputs, self._symbols, self._places = step, bound.inputs, bound.symbols, places
        self._length = bound.symbols[step.past]
        matrices = [bound.inputs[index].t() for index in step.turned]
        matrices += [bound.inputs[index] for index in step.factors]
        self._matrices = packed(matrices, bound.inputs[places[0]].shape[0]) if most >= _WORTH_PACKING else matrices
        self._buffers: list[torch.Tensor] = []
        for indices in step.grows:
            caches = [bound.inputs[index] for index in indices]
            shape = caches[0].shape
            buffer = caches[0].new_empty((len(indices), *shape[:2], self._length + most, shape[3]))
            for index, cache, place in zip(indices, caches, buffer[:, :, :, : self._length], strict=True):
                place.copy_(cache)
                bound.inputs[index] = None
            self._buffers.append(buffer)

    def advance(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the scores after `tokens`, (batch, 1), whose keys and values take the next place."""
        inputs, length = [*self._inputs], self._length
        at_tokens, at_mask = self._places
        inputs[at_tokens], inputs[at_mask] = tokens, mask
        for indices, buffer in zip(self._step.grows, self._buffers, strict=True):
            if not self._step.read.isdisjoint(indices):
                for index, before in zip(indices, buffer.narrow(3, 0, length).unbind(), strict=True):
                    inputs[index] = before
            inputs += buffer.narrow(3, 0, length + 1).unbind()
            inputs += buffer.narrow(3, length, 1).unbind()
        inputs += self._matrices
        # Operators take less time; a submodule of a user may keep tensors for a backward.
        with torch.no_grad() if self._step.calls_user else torch.inference_mode():
            (scores,) = self._step.run(inputs, {**self._symbols, self._step.past: length})
        self._length += 1
        return scores.clone()


def _begun(module: Any, tokens: torch.Tensor, mask: torch.Tensor, cache: Any, most: int) -> _Steps | None:
    """Return the steps after a prompt; None: each is to be a call of the module."""
    if not hasattr(module, "_plan") or module._request.target != "auto" or module._taps:
        return None
    if module.bundle.manifest.attributes or torch.is_autocast_enabled(tokens.device.type):
        return None
    for name in module.bundle.manifest.with_variants("decode"):
        plan: Plan = module._plan(name)
        bound = plan.bind((tokens, mask, cache), {})
        if not bound.violations:
            break
    else:
        return None
    if plan not in _known:
        _known[plan] = _compiled(plan, bound, [part for layer in cache for part in layer])
    step, places = _known[plan], _places(bound, (tokens, mask))
    if step is None or places is None:
        return None
    exceeds = step.most is not None and bound.symbols[step.past] + most > step.most + 1
    return None if exceeds else _Steps(step, bound, places, most)


_known: WeakKeyDictionary[Plan, _Step | None] = WeakKeyDictionary()
"""Steps by plan, which a change of the module drops."""


def _places(bound: Bound, values: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """Return the indices of tensors among the inputs; None: one is no input, or several are the same."""
    indices = {id(each): index for index, each in enumerate(bound.inputs)}
    found = tuple(indices.get(id(value), -1) for value in values)
    return None if -1 in found or len({*found}) < len(found) else found


def _compiled(plan: Plan, bound: Bound, cache: Sequence[torch.Tensor]) -> _Step | None:
    """Return the step of a program; None: native code serves it, or it does more than to append to caches."""
    program, engine, indices = plan.program, plan.engines[-1], _places(bound, cache)
    if plan.engines[0].name not in (PORTABLE, AUTOGRAD) or not isinstance(engine, ForwardEngine):
        return None
    graph = engine.graph
    if program.rebinds or program.container_changes or indices is None or len(graph.outputs) != 1 + len(indices):
        return None
    names = [value.name for value in graph.inputs]
    found = decoding(graph, {names[index]: 1 + order for order, index in enumerate(indices)})
    if found is None:
        return None
    alike: dict[Any, list[int]] = {}
    for index in indices:
        if names[index] in found.grown and isinstance(meta := graph.inputs[index].meta, TensorMeta):
            alike.setdefault(meta.shape, []).append(index)
    past = {shape[2] for shape in alike}
    symbol = past.pop() if len(past) == 1 else None
    if not isinstance(symbol, str):
        return None
    used = {*names_in([found.scores]), *(name for node in found.nodes for name in operands(node))}
    taken, label, grows = [*names], f"{program.name} steps", tuple(map(tuple, alike.values()))
    for group in grows:
        longer = [found.grown[names[index]] for index in group]
        taken += [*longer, *map(slot_of, longer)]
    taken += [*found.turned.values(), *found.factors.values()]
    quick = _quick(found, {each.name: each.meta for each in graph.inputs}, engine.environment)
    run = compile_graph(graph, found.nodes, taken, [found.scores], engine.environment, label=label, replacements=quick)
    most = next((each.max for each in program.dimensions if each.symbol == symbol), None)
    read = frozenset(index for index in indices if names[index] in used)
    calls_user = any(node.op == CALL_SUBMODULE for node in found.nodes)
    turned, factors = (tuple(map(names.index, each)) for each in (found.turned, found.factors))
    return _Step(run, symbol, most, grows, read, turned, factors, calls_user)


def _quick(found: Decoding, inputs: Mapping[str, ValueMeta], environment: Environment) -> dict[str, Any]:
    """Return functions that compute nodes in less time than operators, by name: attention without checks, norms."""
    quick, longer, cpu = dict[str, Any](), {*found.grown.values()}, environment.place("cpu").type == "cpu"
    matrices = {*found.turned.values(), *found.factors.values()}
    for node in found.nodes:
        if is_product(node) and node.args[-1] in matrices:
            quick[node.name] = product
        _, *operands, eps = cast("list[Any]", [*node.args, None, None, None])[:4]
        if node.op == ATTENTION and not {*node.kwargs} - {"scale"}:
            keys, values = (shape_of(inputs, name)[2:3] for name in operands)
            if keys == values != () or longer.issuperset(operands):
                quick[node.name] = functional.scaled_dot_product_attention
        elif node.op == NORM and cpu and is_float32(node.meta) and len(operands[0]) == 1 and isinstance(eps, float):
            quick[node.name] = partial(_normed, torch.tensor(eps))
    return quick


def _normed(
    eps: torch.Tensor, x: torch.Tensor, sizes: list[int], weight: torch.Tensor | None, _: float
) -> torch.Tensor:
    """Return a norm by root mean square over the last axis, by few operators."""
    length = torch.linalg.vector_norm(x, 2, -1, True)
    rows = x * torch.addcmul(eps, length, length, value=1 / sizes[-1]).rsqrt_()
    return rows if weight is None else rows.mul_(weight)
