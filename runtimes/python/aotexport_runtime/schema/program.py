"""A program: its signature, its graphs, and the epilogues of a call.

Under eager autograd the *forward* graph, before autograd, is the program's meaning. The *functional* graph, *joint*
(forward and backward in one) or *inference*, comes with the mutations and aliases that functionalisation took out.
"""

from __future__ import annotations

from typing import Annotated, Literal

from aotexport_runtime.schema import bounded
from aotexport_runtime.schema.bounded import Record, keep_default
from aotexport_runtime.schema.graph import SourceLine, Subclass
from aotexport_runtime.schema.sizes import Condition, Dimension, Size
from aotexport_runtime.schema.trees import Constant, Key, Tree
from aotexport_runtime.schema.values import Argument, MemoryFormat, TensorMeta

TensorInput = Annotated[bounded.Count, bounded.IndexOf("Program.inputs"), bounded.TensorOf("Program.inputs")]
TensorOutput = Annotated[bounded.Count, bounded.IndexOf("Program.outputs"), bounded.TensorOf("Program.outputs")]
TensorIndex = Annotated[bounded.Count, bounded.IndexOf("Plain.inputs"), bounded.TensorOf("Plain.inputs")]
"""An index of a tensor among the inputs of a functional graph."""


class _TensorInput(Record, kw_only=True):
    """A tensor.

    Attributes:
        meta: its metadata at capture, sizes over the program's symbols.
        subclass: structure of a tensor of a wrapper subclass, of state as in `Manifest.state`; None: a plain tensor.
        parts: metadata at capture of the plain tensors that a tensor subclass is made of.
    """

    meta: TensorMeta
    subclass: Subclass | None = None
    parts: tuple[TensorMeta, ...] = ()


class StateInput(_TensorInput, kw_only=True, tag="state", tag_field="kind"):
    """A parameter, buffer or constant of the module, by its name in `Manifest.state`."""

    name: str


class ArgumentInput(_TensorInput, kw_only=True, tag="argument", tag_field="kind"):
    """A tensor of the call.

    Attributes:
        path: where it stands in the call: `x`, `batch['ids'][0]`.
        is_leaf: whether it was a leaf of autograd at capture.
    """

    path: bounded.Line
    is_leaf: bool = True


class SizeInput(Record, kw_only=True, tag="size", tag_field="kind"):
    """A dynamic Python integer of the call: where it stands there, and the symbol that has its value."""

    path: bounded.Line
    symbol: Annotated[str, bounded.Over("Program.dimensions.symbol")]


InputSpec = StateInput | ArgumentInput | SizeInput


class Parameter(Record, kw_only=True):
    """A parameter of the exported callable's signature.

    Attributes:
        name: as in the user's code.
        tree: structure of the argument at capture, or of the default if none was passed.
        optional: whether a call may leave it out (`tree` is then the default, all constants).
        default: default in the user's code of a parameter that no call may leave out; shown, never used.
    """

    name: bounded.Identifier
    kind: Literal["positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword"]
    tree: Annotated[Tree, bounded.IndexOf("Program.inputs")]
    optional: bool = False
    default: Annotated[Constant | None, bounded.IndexOf()] = None


class ViewStep(Record, kw_only=True):
    """One view operator: `op(base, *args)`.

    Attributes:
        args: positional arguments after the base; none refers to a value.
        item: which item of the result is the view; None: the result itself.
    """

    op: bounded.OperatorName
    args: list[Argument] = []
    item: bounded.Count | None = None


class FreshOutput(Record, kw_only=True, tag="fresh", tag_field="kind"):
    """A new tensor (or a size): nothing of the caller's aliases it.

    Attributes:
        requires_grad: whether it requires grad.
        view: `unsafe`: a view that autograd must not know as one (`_unsafe_view`); `custom_function`: one that a custom
            autograd function made; `multi_output`: one of several that one operator made (`split`, `unbind`) (10.10).
    """

    requires_grad: bool = False
    view: Literal["unsafe", "custom_function", "multi_output"] | None = None


class InputItself(Record, kw_only=True, tag="input", tag_field="kind"):
    """The very tensor object of an input."""

    input_index: TensorIndex


class Alias(Record, kw_only=True):
    """A view, regenerated from its base by `steps`, or by `as_strided` when there are none.

    Attributes:
        requires_grad: whether it requires grad.
        under_no_grad: whether the view was made under `torch.no_grad()`, so that no gradient flows through it.
        steps: view operators from the base, first to last; None: there are none that a bundle can say.
    """

    requires_grad: bool = False
    under_no_grad: bool = False
    steps: tuple[ViewStep, ...] | None = None


class InputAlias(Alias, kw_only=True, tag="input_alias", tag_field="kind"):
    """A view of an input, as it is after the mutations were applied."""

    input_index: TensorIndex


class IntermediateAlias(Alias, kw_only=True, tag="intermediate_alias", tag_field="kind"):
    """A view of an intermediate, by its index among the graph's intermediate bases."""

    base_index: Annotated[bounded.Count, bounded.IndexOf("FunctionalGraph.intermediate_bases")]


class OutputAlias(Alias, kw_only=True, tag="output_alias", tag_field="kind"):
    """A view of another output, which is fresh."""

    output_index: TensorOutput


OutputSpec = FreshOutput | InputItself | InputAlias | IntermediateAlias | OutputAlias


class InputMutation(Record, kw_only=True):
    """A change of an input that the epilogue applies from a graph output.

    Attributes:
        data: its elements are overwritten (`copy_`).
        metadata: its sizes, strides or offset change (`as_strided_`).
        storage: it got another storage (`set_`).
        under_no_grad: whether autograd sees no change: all were under `torch.no_grad()` or on a detached alias.
        requires_grad: whether the input required grad at capture.
        is_leaf: whether it was a leaf of autograd.
    """

    input_index: TensorIndex
    data: bool = False
    metadata: bool = False
    storage: bool = False
    under_no_grad: bool = False
    requires_grad: bool = False
    is_leaf: bool = True


class VersionRise(Record, kw_only=True):
    """By how much a call raises the version of an input, as autograd counts changes in place."""

    input_index: TensorIndex
    by: Annotated[bounded.Count, bounded.AtMost(bounded.MAX_NODES)]


class Tangent(Record, kw_only=True):
    """An incoming gradient of the joint graph.

    Attributes:
        index: index into `FunctionalGraph.mutations`, `Program.outputs` or the intermediate bases, by `of`.
        stride: layout that the graph assumes, a step per axis in elements; None: see `memory_format`.
        memory_format: layout that the graph assumes where `stride` is None.
    """

    of: Literal["mutation", "output", "intermediate_base"]
    index: bounded.Count
    meta: TensorMeta
    stride: tuple[Size, ...] | None = None
    memory_format: MemoryFormat | None = None


class Partition(Record, kw_only=True):
    """A partition of the joint graph into forward and backward: the values that are saved in between.

    Attributes:
        name: `default`: everything that backward needs is saved.
        saved: names of values of the joint graph, in its order: inputs, then nodes.
        unchecked: names among `saved` whose version is not checked in backward.
    """

    name: str
    saved: Annotated[tuple[str, ...], bounded.Unique()]
    unchecked: tuple[Annotated[str, bounded.NameOf("Partition.saved", "partition-malformed")], ...] = ()


class VersionCheck(Record, kw_only=True):
    """A tensor whose memory eager reads in backward, and which the caller can change: an input or output by its index.

    One of its tangents is defined in the passes that check it (10.20).
    """

    of: Literal["input", "output"]
    index: bounded.Count
    tangents: Annotated[tuple[Annotated[bounded.Count, bounded.IndexOf("Gradients.tangents")], ...], bounded.Unique()]


class Gradients(Record, kw_only=True):
    """The backward of a joint graph.

    Attributes:
        tangents: graph inputs after `Program.inputs`, in order.
        of_inputs: per entry of `Program.inputs`, index of its gradient among the graph's outputs; None: it has none.
        detached_inputs: inputs without a gradient whose producers and hooks autograd must not visit.
        checks: version checks of eager's backward that differ from those of the graph's saved values (10.20).
        saves_nothing: whether eager saves no tensor for backward (10.20).
        partitions: the first is the default.
    """

    tangents: Annotated[tuple[Tangent, ...], bounded.Unique("of index")]
    of_inputs: Annotated[tuple[bounded.Count | None, ...], bounded.Length("Plain.inputs", "program-malformed")]
    detached_inputs: tuple[TensorIndex, ...] = ()
    checks: Annotated[tuple[VersionCheck, ...], bounded.Unique("of index")] = ()
    saves_nothing: bool = False
    partitions: Annotated[tuple[Partition, ...], bounded.Bounds(minItems=1, code="program-malformed")]


class FunctionalGraph(Record, kw_only=True):
    """A functional graph with its calling convention.

    Its inputs are the program's, each tensor subclass taken apart into its parts; indices and lists per input count
    these. Its outputs are, in order: one per `mutations`, one per `outputs`, `intermediate_bases` bases, then, of a
    joint graph, the gradients that `Gradients.of_inputs` refers to.

    Attributes:
        file: graph file, relative to the program's directory.
        version_rises: inputs whose version rises by another number than the changes of their mutation (10.9).
        outputs: how each output comes back to the caller; as long as `Program.outputs`.
        intermediate_bases: number of intermediates that are returned only as bases of views.
        grad_mode: grad mode that the call leaves behind; None: unchanged.
        deterministic: whether deterministic algorithms were on at capture; for people. None: not recorded.
        guards: truths over the symbols that only this graph assumes; a call that violates one runs the forward graph.
        gradients: of a joint graph; None: an inference graph.
    """

    file: bounded.PlainName
    mutations: Annotated[tuple[InputMutation, ...], bounded.Unique("input_index")] = ()
    version_rises: Annotated[tuple[VersionRise, ...], bounded.Unique("input_index")] = ()
    outputs: Annotated[tuple[OutputSpec, ...], bounded.Length("Program.outputs", "program-malformed")]
    intermediate_bases: Annotated[bounded.Count, bounded.AtMost(bounded.MAX_NODES)] = 0
    grad_mode: bool | None = None
    deterministic: bool | None = None
    guards: tuple[Condition, ...] = ()
    gradients: Gradients | None = None


class ForwardGraph(Record, kw_only=True):
    """The graph before autograd: composite operators, mutations in place. The program's directory has its file.

    Attributes:
        differentiable: whether eager autograd through it gives the module's gradients: no custom autograd functions.
    """

    file: bounded.PlainName
    differentiable: bool = True


class Rebind(Record, kw_only=True):
    """A state tensor that the call replaces by one of its results: `self.total = self.total + x`."""

    name: Annotated[str, bounded.NameOf("Manifest.state.name")]
    output_index: TensorOutput


class ContainerChange(Record, kw_only=True):
    """A list, dict, set or object of the caller's that the call changes, with its items afterwards.

    Attributes:
        path: where it stands in the call: `cache`, `batch['past'][0]`.
        keys: keys of a dict, positions in a list, deque or set, or all fields of a dataclass or object, in order.
        items: new item per key; leaves index `Program.outputs`. None: the old item stays; not in a set.
    """

    path: bounded.Line
    keys: tuple[Key, ...]
    items: tuple[Annotated[Tree | None, bounded.IndexOf("Program.outputs")], ...]


class Refusal(Record, kw_only=True):
    """Why a program lacks a graph, in a sentence or two; for people."""

    graph: Literal["joint", "inference"]
    reason: str


class Question(Record, kw_only=True):
    """A question of the captured code whether values require grad, with the answer that the program holds for.

    Attributes:
        inputs: tensors of which one must require grad for the answer yes (`requires_grad`), and none for no.
        recording: whether only calls that record gradients must have it.
    """

    inputs: Annotated[tuple[TensorInput, ...], bounded.Unique()]
    requires_grad: bool
    recording: bool = False


class Note(Record, kw_only=True):
    """A limit of a program, or a feature that it lacks; for people.

    Attributes:
        kind: `branch`: code of the model branches on values of tensors, and the program goes the example's way;
            `number`: code of the model makes a number of a tensor's values, and the program is for the example's alone;
            `size`: dynamic sizes have a narrower range than was declared, or are held to a relation; `integer`: an
            integer of the call is the example's; `other`: a difference from the model, or a need of the bundle.
        fixed: the fixed value or choice.
        outside: the effect on a call outside of it, and the way out; None: no call is refused for it.
        source: the user's line; None: there is no single one, or it was left out.
    """

    kind: Literal["branch", "number", "size", "integer", "other"]
    text: str
    fixed: str | None = None
    outside: str | None = None
    source: SourceLine | None = None


class Program(Record, kw_only=True):
    """One captured behaviour of the module.

    Attributes:
        name: `train`, `infer`, or the user's.
        mode: `train` or `eval`: the module's mode at capture; `function`: captured from a plain function.
        grad: whether the program was captured for calls that record gradients.
        method: method of the module that was captured, an identifier.
        parameters: the callable's signature with the structure of its arguments; leaves of one index are one object.
        outputs: metadata of each distinct tensor (None: a size) that the call returns, rebinds or puts into containers.
        output_tree: structure of the returned value; its leaves index `outputs`.
        guards: truths over the symbols that a call must satisfy.
        fixed: facts that must be as at capture in every call (8.12).
        autocast: dtype of the autocast around the call at capture, which is no part of the graph; None: there was none.
        differentiated: inputs with regard to which the model itself takes gradients (8.4).
        questions: whether inputs require grad, as far as the program depends on it.
        functional: the joint or inference graph; None with a reason in `refusals`: the forward graph serves every call.
        refusals: functional graphs that could not be captured, or disagreed with eager execution.
    """

    name: bounded.OwnName
    mode: Literal["train", "eval", "function"]
    grad: bool
    method: str = "forward"
    parameters: Annotated[tuple[Parameter, ...], bounded.Unique("name")]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[TensorMeta | None, ...]
    output_tree: Annotated[Tree, bounded.IndexOf("Program.outputs")]
    rebinds: Annotated[tuple[Rebind, ...], bounded.Unique("name")] = ()
    container_changes: Annotated[tuple[ContainerChange, ...], bounded.Unique("path")] = ()
    dimensions: Annotated[tuple[Dimension, ...], bounded.Unique("symbol")] = ()
    guards: tuple[Condition, ...] = ()
    fixed: tuple[
        Literal["layout", "requires_grad", "is_leaf", "grad_mode", "inference_mode", "identity", "autocast"], ...
    ] = ()
    autocast: Literal["bfloat16", "float16"] | None = None
    differentiated: Annotated[tuple[TensorInput, ...], bounded.Unique()] = ()
    questions: tuple[Question, ...] = ()
    forward: ForwardGraph
    functional: FunctionalGraph | None = None
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        keep_default(self, "method")
