"""The whole training step as a method: a joint graph with tangent 1 for the loss, and the optimizer's updates in it.

Invariant: an update writes its parameter in place after the last reader of the old one. Where gradients are not
clipped, it comes as soon as its gradient is whole, so that this lives no longer.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch

from aotexport.capture.functional.capture import Refused, capture_functional_graph
from aotexport.capture.functional.optimizer import Moments, apply_eagerly, clip_graph, moments_of, update_graph
from aotexport.capture.functional.read_rows import compute_read_rows
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
from aotexport_runtime.serving.interface import named_leaves
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
    tree = forward.function.output_tree
    paths = {leaf.index: path for path, leaf in leaves(tree, "output") if isinstance(leaf, Leaf)}
    loss, outputs = _loss_of(forward, paths), _outputs_of(forward, step)
    plan = _Plan(forward, _joint(forward, [loss, *outputs.values()]), step, [*outputs])
    named = {name: paths[index] for name, index in outputs.items()}
    method = MethodType(_method(call, plan, tree, paths[loss], named), call.module)
    kwargs = {**call.kwargs, STATE: plan.example()}
    own = example_call(method, call.args, kwargs, {**call.dynamic_shapes} or None)
    return ProgramSpec(STEP, "train", False, STEP, own), plan.description()


def _loss_of(forward: ForwardCapture, paths: Mapping[int, str]) -> int:
    """Return the index of the loss among the outputs of the graph, of which `paths` has the path by index."""
    outputs: Any = forward.graph.graph.output_node().args[0]

    def may_be_loss(node: Any) -> bool:
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else None
        return isinstance(value, torch.Tensor) and not value.shape and node.meta.get(REQUIRES_GRAD, value.requires_grad)

    found = [index for index in paths if may_be_loss(outputs[index])]
    named = [index for index in found if re.search(r"(\.|\[')loss('\])?$", paths[index])]
    if not found:
        raise ExportFailed(
            "the model returns no loss: a step needs a number that requires grad among what a call returns"
        )
    if len(found) > 1 and len(named) != 1:
        listed = ", ".join(f"`{paths[index]}`" for index in found)
        raise ExportFailed(f"several results may be the loss: {listed}. Return one of them, or name it `loss`")
    return (named if len(found) > 1 else found)[0]


def _outputs_of(forward: ForwardCapture, step: Step) -> dict[str, int]:
    """Return the results that a step returns beside the loss, by name, with their index among the graph's outputs."""
    values: Any = forward.graph.graph.output_node().args[0]
    names = {
        name: leaf.index
        for name, leaf in named_leaves(forward.function.output_tree)
        if isinstance(values[leaf.index], torch.fx.Node) and isinstance(values[leaf.index].meta["val"], torch.Tensor)
    }
    for pattern in step.outputs.split():
        if not fnmatch.filter(names, pattern):
            raise ModelFileInvalid(f"step: `outputs`: no result `{pattern}`; there are {', '.join(names)}")
    return {name: i for name, i in names.items() if any(fnmatch.fnmatch(name, each) for each in step.outputs.split())}


def _joint(forward: ForwardCapture, chosen: Sequence[int]) -> FunctionalCapture:
    """Return the joint graph of the loss, the first of `chosen` outputs, which has the others without gradients."""
    if forward.function.rebinds or forward.function.container_changes:
        raise ExportFailed("calls replace tensors of the module, or change containers, which a step does not")
    alone = torch.fx.Graph()
    returned: Any = alone.graph_copy(forward.graph.graph, {})
    loss, *others = (returned[index] for index in chosen)
    alone.output((loss, *(alone.call_function(torch.ops.aten.detach.default, (other,)) for other in others)))
    compute_read_rows(alone)
    joint = capture_functional_graph(replace(forward, graph=torch.fx.GraphModule(forward.graph, alone)), grad=True)
    if isinstance(joint, Refused):
        raise ExportFailed(f"there is no joint graph, which a step is made of: {joint.reason}")
    values = [node.meta.get("val") for node in joint.module.graph.nodes]
    if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in values):
        raise ExportFailed("a gradient is sparse, and a step makes dense ones alone: give embeddings `sparse=False`")
    metadata = joint.metadata
    tangents = [n for n in joint.module.graph.find_nodes(op="placeholder") if tangent_descriptor(n) is not None]
    if len(tangents) != 1 or metadata.num_intermediate_bases or len(metadata.output_info) != len(chosen):
        raise ExportFailed("the loss shares memory with other values, or calls change tensors that take gradients")
    if any(info.mutates_metadata or info.mutates_storage_metadata for info in metadata.input_info):
        raise ExportFailed("calls change the shape or the storage of the module's tensors, which a step does not")
    return joint


class _Plan:
    """What a step does, node by node of the joint graph.

    Attributes:
        due: per node, the updates of parameters (True) and the writes of buffers that come after it, by index.
        outputs: results beside the loss, by name.
        borrowed: gradients, new buffers and results that share memory with what the step writes or returns.
        entries: the parameters that it updates.
        group_of: index of the group of each of them.
        names: names of the parameters of each group, also of those that take no gradient.
        options: options of the optimizer's groups.
        moments: state that the optimizer keeps, for each parameter that it updates.
    """

    def __init__(self, forward: ForwardCapture, joint: FunctionalCapture, step: Step, names: Sequence[str]) -> None:
        """Plan a step by the joint graph of its loss."""
        self.step, self.module, self.bindings = step, joint.module, forward.bindings
        nodes = list(joint.module.graph.nodes)
        results: Any = nodes[-1].args[0]
        changed = [index for index, info in enumerate(joint.metadata.input_info) if info.mutates_data]
        self.inputs = [node for node in nodes if node.op == "placeholder" and tangent_descriptor(node) is None]
        self.loss, *others = results[len(changed) : len(changed) + 1 + len(names)]
        self.outputs: dict[str, Any] = dict(zip(names, others, strict=True))
        grads = results[len(changed) + 1 + len(names) :]
        found = [(i, grad) for i, grad in enumerate(grads) if grad is not None and forward.bindings[i].entry]
        if not found:
            raise ExportFailed("no parameter of the module takes a gradient")
        if set(changed) & {index for index, _ in found}:
            raise ExportFailed("calls change parameters that a step updates")
        self.entries: list[StateEntry] = [forward.bindings[index].entry for index, _ in found]  # type: ignore[misc]
        trained = [e for e in forward.function.state.entries if e.role == "parameter" and e.tensor.requires_grad]
        groups = {entry.names[0]: step.options_of(entry.names[0]) for entry in trained}
        used = sorted({index for index, _ in groups.values()})
        self.names = [[name for name, (index, _) in groups.items() if index == each] for each in used]
        self.group_of = [used.index(groups[entry.names[0]][0]) for entry in self.entries]
        options = dict(groups.values())
        self.options = [options[index] for index in used]
        self.updates = [(self.inputs[index], grad) for index, grad in found]
        self.copies = [(self.inputs[index], results[place]) for place, index in enumerate(changed)]
        graphs: dict[Any, tuple[Moments, torch.fx.GraphModule]] = {}
        self.moments, self.graphs = list[Moments](), list[torch.fx.GraphModule]()
        for tensor, group in zip([entry.tensor for entry in self.entries], self.group_of, strict=True):
            key = group, tensor.shape, tensor.stride(), tensor.dtype
            if key not in graphs:
                own = moments_of(step, self.options[group], tensor)
                graphs[key] = own, update_graph(step, self.options[group], own, tensor)
            self.moments.append(graphs[key][0])
            self.graphs.append(graphs[key][1])
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
        for output in (self.loss, *self.outputs.values()):
            if memory_of(output.meta["val"]) in owned:
                self.borrowed.add(output)
            owned.add(memory_of(output.meta["val"]))

    def example(self) -> dict[str, Any]:
        """Return state to capture and verify with: second moments are 1, so that updates are as exact as gradients."""
        device = self.entries[0].tensor.device

        def number(value: float) -> torch.Tensor:
            return torch.tensor(value, dtype=torch.float64, device=device)

        def value(name: str) -> float:
            return float("sq" in name or "var" in name or name == "sum")

        tensors = [entry.tensor.detach() for entry in self.entries]
        state: dict[str, Any] = {
            "count": number(9.0),
            "lr": [number(self.step.options_shown(options)["lr"]) for options in self.options],
            "state": [own.made(tensor, value) for own, tensor in zip(self.moments, tensors, strict=True)],
        }
        if self.step.accumulate:
            state |= {"scale": number(1.0), "grads": [*map(torch.zeros_like, tensors)]}
        if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in self.module.graph.nodes):
            state["seed"] = torch.zeros((), dtype=torch.int64, device=device)
        return {**state, "max_norm": number(1.0)} if self.step.clip else state

    def description(self) -> dict[str, Any]:
        """Return what a bundle says of the optimizer."""
        groups: list[dict[str, Any]] = [
            {"options": self.step.options_shown(options), "parameters": names, "state": {}}
            for options, names in zip(self.options, self.names, strict=True)
        ]
        for group, own in zip(self.group_of, self.moments, strict=True):
            groups[group]["state"].update(own.initial)
        updates = [entry.names[0] for entry in self.entries]
        step = self.step
        own = {"optimizer": step.name, "clip": step.clip, "accumulate": step.accumulate, "outputs": step.outputs}
        return {**own, "updates": updates, "groups": groups}


class _Trace(torch.fx.Interpreter):
    """Run the joint graph and, in it, what is due after each node."""

    def __init__(self, plan: _Plan, state: dict[str, Any]) -> None:
        super().__init__(plan.module, garbage_collect_values=False)
        self._plan, self._state = plan, state
        self.given: dict[torch.fx.Node, Any] = {}
        self._grads: dict[int, torch.Tensor] = {}
        self._numbers: dict[Any, Any] = {}
        self._factor: Any = None

    def run_node(self, n: torch.fx.Node) -> Any:
        if tangent_descriptor(n) is not None:
            like = self._plan.loss.meta["val"]
            if "scale" in self._state:
                return self._state["scale"].to(like.dtype)
            return torch.ones((), dtype=like.dtype, device=like.device)
        if n.op == "output" and self._plan.clip is not None:
            grads = [self._grad(index) for index in range(len(self._plan.updates))]
            self._factor = torch.fx.Interpreter(self._plan.clip).run(self._state["max_norm"], *grads)
        value = self.env[n] = super().run_node(n)
        self.given[n] = value.clone() if n in self._plan.borrowed else value
        for is_update, index in self._plan.due.get(n, ()):
            if is_update:
                self._update(index)
            else:
                old, new = self._plan.copies[index]
                self.env[old].copy_(self.given[new])
                if self.env[old].stride() == self.env[new].stride() and self.env[old].dtype is self.env[new].dtype:
                    # Later nodes read the buffer, so that the copied value is freed.
                    self.env[new] = self.env[old]
        return self.env[n]

    def _grad(self, index: int) -> torch.Tensor:
        if index not in self._grads:
            grad = self.given[self._plan.updates[index][1]]
            self._grads[index] = grad + self._state["grads"][index] if "grads" in self._state else grad
        return self._grads[index]

    def _update(self, index: int) -> None:
        plan, state = self._plan, self._state
        parameter = plan.updates[index][0]
        numbers = state["lr"][plan.group_of[index]], state["count"], self._factor
        tensors = self.env[parameter], self._grad(index), *state["state"][index].values()
        _Update(plan.graphs[index], self._numbers).run(*numbers, *tensors)
        if "grads" in state:
            state["grads"][index].zero_()


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


def _method(call: ExampleCall, plan: _Plan, outputs: Tree, path: str, named: dict[str, str]) -> Callable[..., Any]:
    """Return the step as a method of the module: run for real, it is torch's own autograd and optimizer.

    It returns the loss, or with it the results that are `named`, by name.
    """
    signature = signature_of(call.callable)
    if STATE in signature.parameters:
        raise ModelFileInvalid(f"step: `forward` has an argument `{STATE}`, which the method `step` has too")
    given_leaves = [id(leaf) for leaf in tree_leaves((call.args, call.kwargs))]
    if not {id(tensor) for tensor in call.tensors} <= {*given_leaves}:
        raise ExportFailed("the call takes arrays of numpy, which a step does not: give it tensors")
    places = [given_leaves.index(id(tensor)) for tensor in call.tensors]

    def step(self: torch.nn.Module, *args: Any, optimizer: dict[str, Any], **kwargs: Any) -> Any:
        # The module may be a copy of the one that was captured.
        own: dict[str, Any] = dict(self.named_parameters(remove_duplicate=False))
        parameters = [own.get(e.names[0], e.slots[0][0][e.slots[0][1]]) for e in plan.entries]
        if isinstance(optimizer["count"], FakeTensor):
            given = tree_leaves((args, kwargs))
            inputs = [
                given[places[each.argument or 0]]
                if each.entry is None
                else next((table[key] for table, key in each.entry.slots), each.entry.tensor)
                for each in plan.bindings
            ]
            with torch.no_grad():
                trace = _Trace(plan, optimizer)
                trace.run(*inputs, None)
                optimizer["count"].add_(1)
            loss, results = trace.env[plan.loss], {name: trace.given[node] for name, node in plan.outputs.items()}
            return (loss, results) if named else loss
        with torch.enable_grad():
            returned = dict(flat_outputs(outputs, self(*args, **kwargs)))
            grads = torch.autograd.grad(returned[path] * optimizer.get("scale", 1), parameters)
            loss, results = returned[path].detach(), {n: returned[p].detach().clone() for n, p in named.items()}
        with torch.no_grad():
            apply_eagerly(
                *(plan.step, plan.options, plan.moments, [each.detach() for each in parameters]),
                *(grads, optimizer, plan.group_of),
            )
        return (loss, results) if named else loss

    kinds = inspect.Parameter
    own = kinds("self", kinds.POSITIONAL_ONLY), *signature.parameters.values(), kinds(STATE, kinds.KEYWORD_ONLY)
    step.__signature__ = inspect.Signature(sorted(own, key=lambda each: each.kind))  # type: ignore[attr-defined]
    return step
