"""The manifest `bundle.json`: contents, producer and requirements of a bundle."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from aotexport_runtime.schema import bounded
from aotexport_runtime.schema.bounded import Record, keep_default
from aotexport_runtime.schema.graph import Subclass
from aotexport_runtime.schema.trees import Constant, Tree
from aotexport_runtime.schema.values import DType

ListedFile = Annotated[bounded.FilePath, bounded.NameOf("Manifest.files.path", "file-unlisted")]
ProgramName = Annotated[bounded.PlainName, bounded.NameOf("Manifest.programs.name")]


TRANSFORMERS = "x-aotexport-transformers"
"""Extension of language models: what libraries ask of a model of transformers; see `generation.language_model`."""
CLASSES = "x-aotexport-classes"
"""Extension of classifiers: the names of their classes by the model's config, in the order of its scores."""
IN_EVAL = "x-aotexport-in-eval"
"""Extension of modules with submodules that stay in eval mode in training: their paths."""
STEP = "step"
"""Name of the program of a whole training step, and its method, in bundles with the extension `OPTIMIZER`."""
OPTIMIZER = "x-aotexport-step"
"""Extension of bundles with a whole training step: its optimizer; see `module.stepper`."""
TOKENIZER = "tokenizer"
"""Folder with the tokenizer of a language model, as transformers saves it: the first of the files, and others."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class FileEntry(Record, kw_only=True):
    """A file of the bundle."""

    path: bounded.FilePath
    nbytes: bounded.Count
    sha256: bounded.Digest


class ProgramEntry(Record, kw_only=True):
    """A program by name; its record is `programs/<name>/program.json`.

    Attributes:
        name: a plain name: `train`, `infer`.
        targets: forms that the bundle holds of it; `portable` is the graphs themselves.
        variant_of: name of an earlier program that this one is another signature of (4.2), no variant itself.
    """

    name: bounded.PlainName
    targets: tuple[bounded.PlainName, ...] = ("portable",)
    variant_of: bounded.PlainName | None = None

    def __post_init__(self) -> None:
        keep_default(self, "targets")


class StoredPart(Record, kw_only=True):
    """A plain tensor that a state tensor of a wrapper subclass is made of; strides and offset are in elements.

    Attributes:
        file: safetensors file that holds it.
        key: its key in that file; of a part `<FQN>.<attribute>`.
        dtype: element type. Where safetensors lacks it (complex), the key holds `view_as_real` of it.
        offset: where it begins in the span stored under `key`; 0 if `whole`.
        whole: whether `key` holds exactly this tensor, contiguous; otherwise a flat span of storage (4.8).
    """

    file: ListedFile
    key: str
    dtype: DType
    shape: bounded.Axes
    stride: bounded.Axes
    offset: bounded.Offset = 0
    whole: bool = True


class StateTensor(StoredPart, kw_only=True):
    """A parameter, buffer or constant; of a tensor subclass, `file` and `key` are empty, the rest is of the whole.

    Attributes:
        name: FQN in the original module (first of the tied ones), or `constant.<n>` if the code closes over it.
        tied: further FQNs of the very same tensor object.
        role: its role in the module. `constant`: a tensor that the code closes over, or an attribute that is neither
            parameter nor buffer; never an entry of `state_dict`.
        persistent: whether `state_dict` holds it (parameters: always; constants: never).
        requires_grad: whether it required grad at export.
        subclass: structure of a tensor of a wrapper subclass; None: a plain tensor.
        parts: the plain tensors that a tensor subclass is made of.
    """

    name: str
    tied: tuple[str, ...] = ()
    role: Literal["parameter", "buffer", "constant"]
    persistent: bool = True
    requires_grad: bool = False
    file: str = ""
    key: str = ""
    subclass: Subclass | None = None
    parts: tuple[StoredPart, ...] = ()


class ModuleAttribute(Record, kw_only=True):
    """A Python attribute of the module, or of a part of it (`encoder.cache`), that calls read and change."""

    name: bounded.Line
    value: Annotated[Tree, bounded.IndexOf("Manifest.state")]


class Submodule(Record, kw_only=True):
    """A submodule by its path.

    Attributes:
        name: its path; empty: the module itself.
        same_as: path of an earlier entry that is the very same module.
        type: name of its class in `torch.nn`, if that determines its behaviour alone; None: a class of the model's.
        attributes: of a class in `torch.nn`: a mapping of constants, those beside parameters, buffers and submodules.
        absent: names of parameters and buffers that are None (`bias`).
    """

    name: str
    same_as: str | None = None
    type: str | None = None
    attributes: Annotated[Tree | None, bounded.IndexOf()] = None
    absent: tuple[str, ...] = ()


class VectorEntry(Record, kw_only=True):
    """A recorded call of a program.

    Attributes:
        name: unique in its program: `example`, `random`.
        record: file of its `Vector` record.
    """

    program: ProgramName
    name: bounded.PlainName
    record: ListedFile
    tensors: ListedFile


class OnnxModel(Record, kw_only=True):
    """An ONNX model of a program; its initialisers lie in the bundle's safetensors files.

    Attributes:
        file: at the top of the bundle, since ONNX refers to files beside or below only.
        opset: operator set of the default domain.
        inputs: name in the model of each entry of `Program.inputs` that is no state, in order.
        outputs: name in the model of each entry of `Program.outputs`, then of `updates` and of `checks`, in order.
        updates: names of state tensors and paths of arguments that the program changes; the model returns them.
        state_inputs: by name of a state tensor the optional input for it, where calls of some model change it (4.16).
        checks: conditions on the values of a call, in words; for each the model returns whether it holds.
    """

    program: ProgramName
    file: ListedFile
    opset: bounded.Positive
    inputs: tuple[bounded.Line, ...]
    outputs: tuple[bounded.Line, ...]
    updates: Annotated[tuple[bounded.Line, ...], bounded.Unique()] = ()
    state_inputs: dict[Annotated[str, bounded.NameOf("Manifest.state.name")], bounded.Line] = {}
    checks: tuple[bounded.Line, ...] = ()


class Requirements(Record, kw_only=True):
    """Requirements of a machine that runs the bundle.

    Attributes:
        operator_namespaces: namespaces other than aten's whose operators the graphs call.
        operator_modules: Python modules that register them, where known; shown to the user, never imported by itself.
        tensor_types: classes of tensors, and of objects in their contexts: given by the caller of a reader (4.13).
    """

    operator_namespaces: tuple[bounded.Namespace, ...] = ()
    operator_modules: tuple[bounded.ModulePath, ...] = ()
    tensor_types: tuple[bounded.ClassName, ...] = ()


class Producer(Record, kw_only=True):
    """The versions of exporter and torch that wrote the bundle; for people, no reader decides by it."""

    aotexport: bounded.Line
    torch: bounded.Line


class Ancestor(Record, kw_only=True):
    """A bundle that a bundle was made of; for people, no reader decides by it.

    Attributes:
        name: its `Manifest.name`.
        sha256: digest of its `bundle.json`.
        path: path in the exported module that it was loaded to; empty: it was the whole.
        child: index in `Manifest.ancestors` of the bundle that was made of it, after its own; None: this bundle.
    """

    name: bounded.Line
    sha256: bounded.Digest
    path: bounded.Line = ""
    child: bounded.Count | None = None
    changes: tuple[bounded.Line, ...] = ()


OPERATOR_SET = "aotexport.aten/1"
"""The operator set of bundles that name none."""

Verification = Literal["none", "fast", "standard", "full"]
"""How a written bundle was compared with eager execution."""


class Manifest(Record, kw_only=True):
    """The whole of `bundle.json`.

    Attributes:
        format: format version of every JSON file of the bundle, `MAJOR.MINOR`.
        min_reader: oldest format version whose readers understand this bundle, `MAJOR.MINOR`.
        calling_convention: version of how graphs, saved tensors and epilogues are invoked.
        name: name of the exported class or function.
        training: of a module: the mode it was in at export.
        programs: programs, in order of preference.
        state: parameters, then buffers, then constants, each in the module's order.
        attributes: Python attributes that calls read and change, which programs take as the argument `self` (8.2).
        modules: the module and its submodules, in the module's order. Readers may ignore them.
        settings: the module's other attributes, by name, to be read by the caller: values of numbers, flags, None and
            plain names; None for others, and for those that its code asked for in vain.
        testvectors: recorded calls: the self-test.
        verification: how the writer compared the bundle with eager: not at all, in fewer calls than usual (`fast`), as
            usual, or in more (`full`); None: it did not say.
        ancestors: bundles that this one was made of, and those that they were made of.
        operator_set: the operators of `aten` that the graphs are written in, with what they mean.
        extensions: what the format gives no meaning, by name (3.4).
        must_understand: names among `extensions` that a reader may not skip (3.5).
        files: every other file of the bundle, sorted by path.
    """

    format: bounded.VersionText
    min_reader: bounded.VersionText
    calling_convention: bounded.Convention
    producer: Producer
    name: bounded.Line
    kind: Literal["module", "function"]
    training: bool = False
    programs: Annotated[
        tuple[ProgramEntry, ...], bounded.Bounds(minItems=1, code="program-malformed"), bounded.Unique("name")
    ]
    state: tuple[StateTensor, ...] = ()
    attributes: Annotated[tuple[ModuleAttribute, ...], bounded.Unique("name")] = ()
    modules: Annotated[tuple[Submodule, ...], bounded.Unique("name")] = ()
    settings: dict[bounded.Line, Annotated[Constant | None, bounded.IndexOf()]] = {}
    testvectors: Annotated[tuple[VectorEntry, ...], bounded.Unique("program name")] = ()
    verification: Verification | None = None
    ancestors: tuple[Ancestor, ...] = ()
    onnx: Annotated[tuple[OnnxModel, ...], bounded.Unique("program")] = ()
    requirements: Requirements = Requirements()
    operator_set: bounded.OperatorSet = OPERATOR_SET
    extensions: dict[bounded.ExtensionName, Any] = {}
    must_understand: tuple[Annotated[bounded.ExtensionName, bounded.NameOf("Manifest.extensions")], ...] = ()
    files: Annotated[tuple[FileEntry, ...], bounded.Unique("path")]

    def with_variants(self, name: str) -> list[str]:
        """Return the names of a program and of its variants, in order of preference."""
        return [name, *(entry.name for entry in self.programs if entry.variant_of == name)]

    def __post_init__(self) -> None:
        keep_default(self, "requirements")
        keep_default(self, "operator_set")


def step_program(manifest: Manifest) -> str | None:
    """Return the name of the program that is a whole training step; None: a bundle has none.

    Without the extension a program of that name is a method of the user's.
    """
    return STEP if OPTIMIZER in manifest.extensions else None
