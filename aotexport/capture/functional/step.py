"""The whole training step as a method: a joint graph with tangent 1 for the loss, and the optimizer's updates in it.

Invariant: an update writes its parameter in place after the last reader of the old one. Where gradients are not
clipped, it comes as soon as its gradient is whole, so that this lives no longer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

from aotexport.capture.functional.capture import Refused, capture_functional_graph
from aotexport.capture.functional.optimizer import apply_eagerly, clip_graph, moments_of, update_graph
from aotexport.capture.trace.forward_capture import ForwardCapture
from aotexport.errors import ExportFailed, ModelFileInvalid
from aotexport.model.call import ExampleCall, example_call, signature_of
from aotexport.model.programs import ProgramSpec
from aotexport.model.state import StateEntry
from aotexport.model.step import Step
from aotexport.torch_internals.calls import FakeTensor, memory_of, tensors_in, tree_leaves
from aotexport.torch_internals.functional import FunctionalCapture, tangent_descriptor
from aotexport.torch_internals.tracing import REQUIRES_GRAD
from aotexport_runtime.call.flat_call import flat_outputs
from aotexport_runtime.schema.manifest import STEP
from aotexport_runtime.schema.trees import Leaf, Tree
from aotexport_runtime.values.trees import leaves

STATE = "optimizer"
"""Argument of the method beside those of `forward`: the optimizer's state."""


def step_spec(train: ProgramSpec, forward: ForwardCapture, step: Step) -> tuple[ProgramSpec, dict[str, Any]]:
    """Return the program `step` of the program `train`, given the forward graph of that, and what a bundle says of it.

    Raises:
        ExportFailed: there is no such graph; says why.
        ModelFileInvalid: `forward` has an argument of the name that the optimizer's state has.
    """
    call = train.call
    if call.module is None:
        raise ExportFailed("a function has no parameters, which a step would change")
    path, index = _loss_of(forward)
    plan = _Plan(forward, _joint(forward, index), step)
    method = MethodType(_method(call, plan, forward.function.output_tree, path), call.module)
    kwargs = {**call.kwargs, STATE: plan.example()}
    own = example_call(method, call.args, kwargs, {**call.dynamic_shapes} or None)
    return ProgramSpec(STEP, "train", False, STEP, own), plan.description()


def _loss_of(forward: ForwardCapture) -> tuple[str, int]:
    """Return the path of the loss in what a call returns, and its index among the outputs of the graph."""
    outputs: Any = forward.graph.graph.output_node().args[0]

    def may_be_loss(node: Any) -> bool:
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else None
        return isinstance(value, torch.Tensor) and not value.shape and node.meta.get(REQUIRES_GRAD, value.requires_grad)

    found = {
        leaf.index: path
        for path, leaf in leaves(forward.function.output_tree, "output")
        if isinstance(leaf, Leaf) and may_be_loss(outputs[leaf.index])
    }
    named = {index: path for index, path in found.items() if re.search(r"(\.|\[')loss('\])?$", path)}
    if not found:
        raise ExportFailed(
            "the model returns no loss: a step needs a number that requires grad among what a call returns"
        )
    if len(found) > 1 and len(named) != 1:
        listed = ", ".join(f"`{path}`" for path in found.values())
        raise ExportFailed(f"several results may be the loss: {listed}. Return one of them, or name it `loss`")
    index, path = next(iter((named if len(found) > 1 else found).items()))
    return path, index


def _joint(forward: ForwardCapture, loss: int) -> FunctionalCapture:
    """Return the joint graph of the loss alone."""
    if forward.function.rebinds or forward.function.container_changes:
        raise ExportFailed("calls replace tensors of the module, or change containers, which a step does not")
    alone = torch.fx.Graph()
    returned: Any = alone.graph_copy(forward.graph.graph, {})
    alone.output((returned[loss],))
    joint = capture_functional_graph(replace(forward, graph=torch.fx.GraphModule(forward.graph, alone)), grad=True)
    if isinstance(joint, Refused):
        raise ExportFailed(f"there is no joint graph, which a step is made of: {joint.reason}")
    values = [node.meta.get("val") for node in joint.module.graph.nodes]
    if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in values):
        raise ExportFailed("a gradient is sparse, and a step makes dense ones alone: give embeddings `sparse=False`")
    metadata = joint.metadata
    tangents = [n for n in joint.module.graph.find_nodes(op="placeholder") if tangent_descriptor(n) is not None]
    if len(tangents) != 1 or metadata.num_intermediate_bases or len(metadata.output_info) != 1:
        raise ExportFailed("the loss shares memory with other values, or calls change tensors that take gradients")
    if any(info.mutates_metadata or info.mutates_storage_metadata for info in metadata.input_info):
        raise ExportFailed("calls change the shape or the storage of the module's tensors, which a step does not")
    return joint


class _Plan:
    """What a step does, node by node of the joint graph.

    Attributes:
        due: per node, the updates of parameters (True) and the writes of buffers that come after it, by index.
        borrowed: gradients and new buffers that share memory with inputs, which the step writes.
        entries: the parameters that it updates.
        group_of: index of the group of each of them.
        names: names of the parameters of each group, also of those that take no gradient.
        groups: options of the optimizer's groups, with the state that it keeps for parameters of these.
    """

    def __init__(self, forward: ForwardCapture, joint: FunctionalCapture, step: Step) -> None:
        """Plan a step by the joint graph of its loss."""
        self.step, self.module, self.bindings = step, joint.module, forward.bindings
        nodes = list(joint.module.graph.nodes)
        results: Any = nodes[-1].args[0]
        changed = [index for index, info in enumerate(joint.metadata.input_info) if info.mutates_data]
        self.inputs = [node for node in nodes if node.op == "placeholder" and tangent_descriptor(node) is None]
        self.loss, grads = results[len(changed)], results[len(changed) + 1 :]
        found = [(i, grad) for i, grad in enumerate(grads) if grad is not None and forward.bindings[i].entry]
        if not found:
            raise ExportFailed("no parameter of the module takes a gradient")
        if set(changed) & {index for index, _ in found}:
            raise ExportFailed("calls change parameters that a step updates")
        self.entries: list[StateEntry] = [forward.bindings[index].entry for index, _ in found]  # type: ignore[misc]
        trained = [e for e in forward.function.state.entries if e.role == "parameter" and e.tensor.requires_grad]
        own = {entry.names[0]: step.options_of(entry.names[0]) for entry in trained}
        used = sorted({index for index, _ in own.values()})
        self.names = [[name for name, (index, _) in own.items() if index == each] for each in used]
        self.group_of = [used.index(own[entry.names[0]][0]) for entry in self.entries]
        options = dict(own.values())
        self.groups = [(options[index], moments_of(step, options[index])) for index in used]
        self.updates = [(self.inputs[index], grad) for index, grad in found]
        self.copies = [(self.inputs[index], results[place]) for place, index in enumerate(changed)]
        graphs: dict[Any, torch.fx.GraphModule] = {}
        self.graphs: list[torch.fx.GraphModule] = []
        for tensor, group in zip([entry.tensor for entry in self.entries], self.group_of, strict=True):
            key = group, tensor.shape, tensor.stride(), tensor.dtype
            graphs[key] = graphs.get(key) or update_graph(step, *self.groups[group], tensor)
            self.graphs.append(graphs[key])
        self.clip = clip_graph([grad.meta["val"] for _, grad in self.updates]) if step.clip else None
        self._place(nodes)

    def _place(self, nodes: Sequence[torch.fx.Node]) -> None:
        """Find the node after which each update and each copy comes."""
        places, last = {node: place for place, node in enumerate(nodes)}, dict[int, int]()
        for place, node in enumerate(nodes[:-1]):
            for tensor in tensors_in([read.meta.get("val") for read in node.all_input_nodes]):
                last[memory_of(tensor)] = place
        owned = {memory_of(tensor) for tensor in tensors_in([node.meta["val"] for node in self.inputs])}
        self.due: dict[torch.fx.Node, list[tuple[bool, int]]] = {}
        for is_update, pairs in ((True, self.updates), (False, self.copies)):
            for index, (old, new) in enumerate(pairs):
                after = nodes[max(places[new], last.get(memory_of(old.meta["val"]), 0))]
                after = nodes[-1] if is_update and self.step.clip else after
                self.due.setdefault(after, []).append((is_update, index))
        news = [new for _, new in (*self.updates, *self.copies)]
        self.borrowed = {new for new in news if memory_of(new.meta["val"]) in owned}

    def example(self) -> dict[str, Any]:
        """Return state to capture and verify with: second moments are 1, so that updates are as exact as gradients."""
        device = self.entries[0].tensor.device

        def number(value: float) -> torch.Tensor:
            return torch.tensor(value, dtype=torch.float64, device=device)

        own = [(e.tensor.detach(), self.groups[g][1].names) for e, g in zip(self.entries, self.group_of, strict=True)]
        state: dict[str, Any] = {
            "count": number(9.0),
            "lr": [number(self.step.options_shown(options)["lr"]) for options, _ in self.groups],
            "state": [
                {name: torch.full_like(tensor, float("sq" in name or name == "sum")) for name in names}
                for tensor, names in own
            ],
        }
        if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in self.module.graph.nodes):
            state["seed"] = torch.zeros((), dtype=torch.int64, device=device)
        return {**state, "max_norm": number(1.0)} if self.step.clip else state

    def description(self) -> dict[str, Any]:
        """Return what a bundle says of the optimizer."""
        groups = [
            {
                "options": self.step.options_shown(options),
                "state": list(moments.names),
                "initial": moments.initial,
                "parameters": names,
            }
            for names, (options, moments) in zip(self.names, self.groups, strict=True)
        ]
        updates = [entry.names[0] for entry in self.entries]
        return {"optimizer": self.step.kind.__name__, "clip": self.step.clip, "updates": updates, "groups": groups}


class _Trace(torch.fx.Interpreter):
    """Run the joint graph and, in it, what is due after each node."""

    def __init__(self, plan: _Plan, state: dict[str, Any]) -> None:
        super().__init__(plan.module, garbage_collect_values=False)
        self._plan, self._state = plan, state
        self._given: dict[torch.fx.Node, Any] = {}
        self._numbers: dict[Any, Any] = {}
        self._factor: Any = None

    def run_node(self, n: torch.fx.Node) -> Any:
        if tangent_descriptor(n) is not None:
            like = self._plan.loss.meta["val"]
            return torch.ones((), dtype=like.dtype, device=like.device)
        if n.op == "output" and self._plan.clip is not None:
            grads = [self._given[grad] for _, grad in self._plan.updates]
            self._factor = torch.fx.Interpreter(self._plan.clip).run(self._state["max_norm"], *grads)
        value = self.env[n] = super().run_node(n)
        self._given[n] = value.clone() if n in self._plan.borrowed else value
        for is_update, index in self._plan.due.get(n, ()):
            if is_update:
                self._update(index)
            else:
                old, new = self._plan.copies[index]
                self.env[old].copy_(self._given[new])
        return value

    def _update(self, index: int) -> None:
        plan, state = self._plan, self._state
        parameter, grad = plan.updates[index]
        numbers = state["lr"][plan.group_of[index]], state["count"], self._factor
        tensors = self.env[parameter], self._given[grad], *state["state"][index].values()
        _Update(plan.graphs[index], self._numbers).run(*numbers, *tensors)


class _Update(torch.fx.Interpreter):
    """Run an update; numbers that an update before has computed are not computed again."""

    def __init__(self, graph: torch.fx.GraphModule, numbers: dict[Any, Any]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._numbers, self._values = numbers, list[Any]()
        self._of_numbers = set(graph.graph.find_nodes(op="placeholder")[:2])

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or not self._of_numbers.issuperset(n.all_input_nodes):
            return super().run_node(n)
        self._of_numbers.add(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        key = n.target, *(id(arg) if isinstance(arg, torch.Tensor) else arg for arg in args), *kwargs.items()
        if key not in self._numbers:
            self._numbers[key] = super().run_node(n)
        return self._numbers[key]


def _method(call: ExampleCall, plan: _Plan, outputs: Tree, path: str) -> Callable[..., Any]:
    """Return the step as a method of the module: run for real, it is torch's own autograd and optimizer."""
    signature = signature_of(call.callable)
    if STATE in signature.parameters:
        raise ModelFileInvalid(f"step: `forward` has an argument `{STATE}`, which the method `step` has too")
    given_leaves = [id(leaf) for leaf in tree_leaves((call.args, call.kwargs))]
    places = [given_leaves.index(id(tensor)) for tensor in call.tensors]

    def step(self: torch.nn.Module, *args: Any, optimizer: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        parameters = [entry.slots[0][0][entry.slots[0][1]] for entry in plan.entries]
        if isinstance(optimizer["count"], FakeTensor):
            given = tree_leaves((args, kwargs))
            inputs = [
                given[places[b.argument or 0]] if b.entry is None else b.entry.slots[0][0][b.entry.slots[0][1]]
                for b in plan.bindings
            ]
            with torch.no_grad():
                trace = _Trace(plan, optimizer)
                trace.run(*inputs, None)
                optimizer["count"].add_(1)
            return trace.env[plan.loss]
        with torch.enable_grad():
            loss = dict(flat_outputs(outputs, self(*args, **kwargs)))[path]
            grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            apply_eagerly(
                plan.step, plan.groups, [each.detach() for each in parameters], grads, optimizer, plan.group_of
            )
        return loss.detach()

    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    state = inspect.Parameter(STATE, inspect.Parameter.KEYWORD_ONLY)
    others = list(signature.parameters.values())
    count = len(others) - any(each.kind is each.VAR_KEYWORD for each in others)
    step.__signature__ = inspect.Signature([*own, *others[:count], state, *others[count:]])  # type: ignore[attr-defined]
    return step
