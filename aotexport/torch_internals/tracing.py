"""Trace functions before autograd, and the subgraphs of operators in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback

# The composite operators, to decompose.
from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace as composite_operators

# The tracing context gives AOTAutograd the fake mode and shape environment to use.
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

# Traced graphs are read and interpreted; lazy graph modules generate Python code only when called.
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.utils._pytree import tree_leaves, tree_map

# The tracer's table of tensors.
from torch.utils.weak import WeakTensorKeyDictionary

from aotexport.process.patches import Patch, patched
from aotexport.torch_internals.frames import frames_kept
from aotexport.torch_internals.names import OpOverload
from aotexport.torch_internals.outside import function_modes
from aotexport.torch_internals.patches import convolution_choice_unguarded, exporting
from aotexport.torch_internals.subclasses import adopt, subclasses_tracked
from aotexport.torch_internals.transforms import load_forward_mode
from aotexport_runtime.values.subclasses import is_wrapper


def stamped(stamp: Callable[[torch.fx.Node], None]) -> contextlib.AbstractContextManager[None]:
    """Call `stamp` with every traced node."""
    original = PythonKeyTracer.create_node

    def create_node(self: PythonKeyTracer, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = original(self, *args, **kwargs)
        stamp(node)
        return node

    return patched(Patch(PythonKeyTracer, "create_node", create_node, "Stamp traced nodes"))


def nodes_annotated(annotations: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context that adds these entries to `node.meta['custom']` of new nodes."""
    return torch.fx.traceback.annotate(annotations)


def node_annotations() -> dict[str, Any]:
    """Return the mutable mapping whose entries the tracer copies to `node.meta['custom']` of new nodes."""
    return torch.fx.traceback.get_current_meta().setdefault("custom", {})


@contextlib.contextmanager
def node_meta_preserved() -> Iterator[None]:
    """Let traced nodes take metadata over, and leave none behind.

    Torch 2.13 restores the outer metadata, but not the annotations in it, which are changed in place: those of a model
    (as by flexible attention) would stay, and later compilations would use them.
    """
    with torch.fx.traceback.preserve_node_meta():
        meta = torch.fx.traceback.get_current_meta()
        meta["custom"] = dict(meta.get("custom", {}))
        yield


class _TensorsByMemory(WeakTensorKeyDictionary):
    """The tracer's tensors, found by their memory if the object is another.

    Autograd returns saved results as new tensors of the same memory; a model that computes gradients itself reads
    these.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_memory: dict[Any, tuple[Any, Any]] = {}

    def __setitem__(self, tensor: torch.Tensor, proxy: Any) -> None:
        super().__setitem__(tensor, proxy)
        if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
            # Holding the storage keeps its address from being reused.
            self._by_memory[_memory(tensor)] = (tensor.untyped_storage(), proxy)

    def get(self, tensor: torch.Tensor, default: Any = None) -> Any:
        found = super().get(tensor)
        if found is None and isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
            return self._by_memory.get(_memory(tensor), (None, default))[1]
        return default if found is None else found


def _memory(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors of the same elements of the same memory."""
    layout = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
    sizes = tuple(size if isinstance(size, int) else str(size) for size in layout)
    return tensor.untyped_storage()._cdata, tensor.dtype, tensor.is_conj(), tensor.is_neg(), sizes


def _saved_tensors_known() -> contextlib.AbstractContextManager[None]:
    """Let tracers recognise tensors that autograd saved."""
    original = PythonKeyTracer.__init__

    def init(self: PythonKeyTracer) -> None:
        original(self)
        self.tensor_tracker = _TensorsByMemory()

    return patched(Patch(PythonKeyTracer, "__init__", init, "Know tensors that autograd saved by their memory"))


REQUIRES_GRAD = "requires_grad"
"""Metadata of nodes of a forward graph: whether autograd recorded the value as it was traced."""


def _gradients_noted() -> contextlib.AbstractContextManager[None]:
    """Note in the metadata of each node whether autograd records its value, which `meta['val']` does not tell."""
    track = proxy_tensor.track_tensor

    def track_tensor(tensor: torch.Tensor, proxy: Any, *, constant: Any, tracer: Any) -> None:
        track(tensor, proxy, constant=constant, tracer=tracer)
        proxy.node.meta[REQUIRES_GRAD] = tensor.requires_grad

    return patched(Patch(proxy_tensor, "track_tensor", track_tensor, "Note which values require gradients"))


def layouts_unnoted() -> contextlib.AbstractContextManager[None]:
    """Return a context in which nodes get no `meta['tensor_meta']`.

    `meta['val']` tells more; the other costs symbolic arithmetic for memory formats. Torch's compiler reads it.
    """
    reason = "Compute no memory format of traced values"
    return patched(Patch(proxy_tensor, "_extract_tensor_metadata", lambda value: None, reason))


def _autocast_cache_kept() -> contextlib.AbstractContextManager[None]:
    """Let regions of autocast in traced code use the cache of casts as in eager; `make_fx` would turn it off.

    With it a weight that is used twice is cast once, and its gradients are summed in the lower precision.
    """
    # Drop the casts of other traces.
    torch.clear_autocast_cache()
    reason = "Cast a weight once in a region of autocast, as eager does"
    return patched(Patch(proxy_tensor, "disable_autocast_cache", contextlib.nullcontext, reason))


_CONVERSIONS = (
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.to.other,
    torch.ops.aten.type_as.default,
)


def _conversions_apart() -> contextlib.AbstractContextManager[None]:
    """Let conversions that have nothing to do return another tensor on the same memory.

    Eager returns the operand itself, which the tracer would know as the result of the conversion from then on. In
    another dtype, as under autocast, the two differ.
    """
    call: Any = proxy_tensor.proxy_call

    def proxy_call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        known = proxy_tensor.get_proxy_slot(args[0], mode.tracer, None) if func in _CONVERSIONS else None
        result = call(mode, func, pre_dispatch, args, kwargs)
        if known is None or result is not args[0] or is_wrapper(result) or known.proxy.node.op != "call_function":
            return result
        # Autograd records it as it does the operand.
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            twin = result.view_as(result) if result.requires_grad else result.detach()
        proxy_tensor.set_proxy_slot(twin, mode.tracer, proxy_tensor.get_proxy_slot(result, mode.tracer))
        proxy_tensor.set_proxy_slot(result, mode.tracer, known)
        return twin

    return patched(Patch(proxy_tensor, "proxy_call", proxy_call, "Tell apart a conversion and its operand"))


def trace_forward(
    function: Callable[..., Any],
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode,
    *,
    keeps_frame: Callable[[FrameType], bool],
    decompositions: Mapping[Any, Callable[..., Any]],
    above_autograd: bool = True,
    whole_composites: bool = True,
) -> torch.fx.GraphModule:
    """Trace `function` before autograd: composite operators, mutations in place, grad-mode changes as nodes.

    Args:
        function: takes and returns flat tensors.
        fakes: fake tensors of `fake_mode`, one per input.
        fake_mode: the mode under which the trace runs.
        keeps_frame: whether a frame runs the user's code, so that its line is recorded.
        decompositions: functions to trace in place of operators, which then get no nodes.
        above_autograd: False: trace below autograd and function transforms, which then get no nodes: composite
            operators are decomposed, and grad-mode changes do not show.
        whole_composites: False: decompose composite operators, so that no tensor that autograd saves is inside them.
    """
    load_forward_mode()
    with (
        exporting(),
        _use_lazy_graph_module(True),
        convolution_choice_unguarded(fake_mode),
        tracing(TracingContext(fake_mode)),
        fake_mode,
        node_meta_preserved(),
        frames_kept(keeps_frame),
        subclasses_tracked(),
        _saved_tensors_known(),
        _gradients_noted(),
        layouts_unnoted(),
        _autocast_cache_kept(),
        _conversions_apart(),
    ):

        def adopting(*inputs: Any) -> Any:
            outputs = function(*inputs)
            mode = proxy_tensor.get_proxy_mode()
            for output in outputs:
                if is_wrapper(output) and mode is not None:
                    adopt(output, mode.tracer)
            return outputs

        composites = () if whole_composites else composite_operators()
        apart = {each: each.decompose for each in composites if isinstance(each, OpOverload)}
        tracer = make_fx(
            adopting,
            decomposition_table={**apart, **decompositions},
            tracing_mode="real",
            pre_dispatch=above_autograd,
            record_stack_traces=True,
            _allow_non_fake_inputs=True,
        )
        return tracer(*fakes)


def traces_above_autograd() -> bool:
    """Return whether a forward graph is being traced, and no function transform is in between."""
    mode = proxy_tensor.get_proxy_mode()
    return mode is not None and mode.pre_dispatch and not torch._C._are_functorch_transforms_active()


def is_functionalised(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one with which AOTAutograd traces its graphs."""
    return isinstance(tensor, FunctionalTensor)


class UnpausedMode(torch.overrides.TorchFunctionMode):
    """A mode that stays while the recording of operators is paused."""


@contextlib.contextmanager
def tracing_paused() -> Iterator[PythonKeyTracer]:
    """Pause the recording of operators and changes of grad mode; yield the tracer."""
    with (
        function_modes(lambda mode: isinstance(mode, UnpausedMode)),
        proxy_tensor.disable_proxy_modes_tracing() as mode,
    ):
        yield mode.tracer  # type: ignore[misc]


def trace_subgraph(
    function: Callable[..., Any], operands: Sequence[Any], *, keeps_frame: Callable[[FrameType], bool]
) -> torch.fx.GraphModule:
    """Trace the subgraph of an operator, while the trace around it is paused; it returns a list of values.

    Tensors from outside of `function` become attributes of the graph; `lift_tensors` makes them inputs.
    """
    current = proxy_tensor._CURRENT_MAKE_FX_TRACER
    assert current is not None
    tracer = current._make_sub_tracer()
    with tracer._init_modes_from_parent(current), frames_kept(keeps_frame):
        assert tracer.fx_tracer is not None
        tracer.fx_tracer.record_stack_traces = True
        return tracer._trace_inner(function, *operands)


def record_call(
    tracer: PythonKeyTracer, target: Callable[..., Any], args: tuple[Any, ...], results: Any, **kwargs: Any
) -> None:
    """Record a call with results, which may have subgraphs among its arguments; keyword arguments hold no tensors.

    Raises:
        LookupError: an argument is a tensor that the trace does not know.
    """
    current = proxy_tensor._CURRENT_MAKE_FX_TRACER
    nested = current is not None and current.is_hop_subgraph_tracer()
    for leaf in tree_leaves(args):
        known = nested or not isinstance(leaf, FakeTensor) or proxy_tensor.has_proxy_slot(leaf, tracer)
        if not known:
            raise LookupError("a subgraph uses a tensor that was computed elsewhere and is not passed to it")
        if isinstance(leaf, torch.fx.GraphModule):
            tracer.root.register_module(tracer.get_fresh_qualname("body"), leaf)
    proxy = tracer.create_proxy("call_function", target, tree_map(tracer.unwrap_proxy, args), kwargs)
    proxy_tensor.track_tensor_tree(results, proxy, constant=None, tracer=tracer)


def traces_subgraph() -> bool:
    """Return whether the subgraph of an operator is being traced, or tracing is paused."""
    current = proxy_tensor._CURRENT_MAKE_FX_TRACER
    return current_tracer() is None or current is None or current.is_hop_subgraph_tracer()


def traced_value(value: Any) -> Any:
    """Return the node of a tensor or symbolic size in the current trace; the value itself if the trace has none."""
    tracer = current_tracer()
    proxy = value if tracer is None else tracer.unwrap_proxy(value)
    return proxy.node if isinstance(proxy, torch.fx.Proxy) else value


def record_mark(target: Callable[..., Any], *args: Any) -> torch.fx.Proxy:
    """Record a call without a result in the trace of a forward graph; return its proxy, an argument for later marks.

    Of lists of tensors, those that the trace knows are recorded.
    """
    tracer = current_tracer()
    known = [
        [tracer.unwrap_proxy(t) for t in arg if proxy_tensor.has_proxy_slot(t, tracer)]
        if isinstance(arg, list)
        else arg
        for arg in args
    ]
    proxy = tracer.create_proxy("call_function", target, tuple(known), {})
    proxy.node.meta["val"] = None
    return proxy


UNCHECKED = "saved_tensor_with_no_vc_check"
"""Metadata of nodes of a joint graph: backward uses the value without a check of its version."""


def annotate_values(tensors: Sequence[torch.Tensor], key: str) -> None:
    """Set `key` in the metadata of these tensors' nodes, in a graph being traced; do nothing elsewhere."""
    for tensor in tensors:
        for proxy in proxy_tensor._get_proxies(tensor):
            proxy.node.meta[key] = True


def is_of_backward(node: torch.fx.Node) -> bool:
    """Return whether a node of a joint graph was traced in backward, or is a tangent."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_of_forward(node: torch.fx.Node) -> bool:
    """Return whether a node of a joint graph computes a number, or was traced in forward.

    Nodes of a hook or custom function have no tag, nor have views of results that are made anew at the end.
    """
    while "partitioner_tag" not in node.meta and isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return not is_tensor or node.meta.get("partitioner_tag") == "is_forward"


def current_tracer() -> Any:
    """Return the tracer of the current trace; None: there is none."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


def node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
    """Return the node that computes a tensor in the trace that is going on; None: there is none."""
    tracer = current_tracer()
    slot = None if tracer is None else proxy_tensor.get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node
