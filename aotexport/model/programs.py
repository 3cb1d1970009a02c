"""Choose the programs to capture: by default, by name, or by the user's description, with their example calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node

from aotexport.errors import ModelFileInvalid
from aotexport.model.call import ExampleCall, example_call, signature_of, sizes_by_name
from aotexport_runtime.schema import trees
from aotexport_runtime.schema.bounded import PlainName, bounds_of
from aotexport_runtime.schema.sizes import Size, SizeExpression
from aotexport_runtime.values.arguments import check_type
from aotexport_runtime.values.trees import keys_of

Mode = Literal["train", "eval", "function"]


@dataclass(frozen=True)
class Example:
    """An example call.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        dynamic_shapes: the sizes that may differ from the example's, in the form of `torch.export.export`; None: those
            of the export, by the names of the arguments; {}: none.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None


AnyExample = Example | tuple[Any, ...] | Mapping[str, Any]
"""An example call; a tuple is its positional arguments, a mapping its keyword arguments."""


@dataclass(frozen=True)
class Program:
    """A program to capture.

    Attributes:
        name: letters, digits, `_`, `.`, `-`, at most 64, beginning with a letter or digit.
        mode: mode to put the module in.
        grad: capture it for calls that record gradients (the joint graph); False: for those that do not.
        method: method of the module to capture, or a function of the module and its arguments, captured as a method
            of its name; a loaded bundle has it as a method too.
        example: its example call; None: that of the export.
        variants: further example calls, whose signatures (structure, dtypes, ranks, constants) the first does not fit.
    """

    name: str
    mode: Literal["train", "eval"] = "eval"
    grad: bool = False
    method: str | Callable[..., Any] = "forward"
    example: AnyExample | None = None
    variants: Iterable[AnyExample] = ()


@dataclass(frozen=True)
class ModelSource:
    """A model with its example call, and options of `aotexport.export` that come with it.

    Attributes:
        name: the model file, as the user wrote it.
        target: a module, or a function of tensors.
        root: directory that source lines, and the file's own imports, are relative to.
        programs: None: the default.
    """

    name: str
    target: nn.Module | Callable[..., Any]
    example: Example
    root: Path
    programs: tuple[str | Program, ...] | None = None
    variants: tuple[Example, ...] = ()
    keep_operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramSpec:
    """One capture: a program, or the variant `variant_of` one.

    Attributes:
        mode: mode to put the module in; `function` without a module.
        grad: capture the joint graph; False: the inference graph.
        without: arguments of that program that this variant leaves out; the export adds it unasked, and drops it if it
            cannot be captured.
        autocast: the autocast that it is captured under, on the device of the call; None: that of the export.
    """

    name: str
    mode: Mode
    grad: bool
    method: str
    call: ExampleCall
    variant_of: str | None = None
    without: tuple[str, ...] = ()
    autocast: str | None = None


NAMED = {
    "train": Program("train", mode="train", grad=True),
    "infer": Program("infer"),
    "eval-joint": Program("eval-joint", grad=True),
}
"""The programs that can be given by name alone."""


def choose_programs(
    target: nn.Module | Callable[..., Any],
    example: AnyExample,
    programs: str | Program | Iterable[str | Program] | None = None,
    variants: Iterable[AnyExample] = (),
) -> list[ProgramSpec]:
    """Return the programs to capture, each before its variants.

    `programs` are names among `NAMED` and descriptions; None: `train` and `infer` for a module that is in train mode or
    has trainable parameters, else `train` when an input requires grad, else `infer`; of a module of `torch.export`
    those of the mode that it was exported in. `variants` are further calls of every program of `forward` without an
    example of its own. `ModelFileInvalid`: an unknown name, a name twice, no such method, or an example that does not
    fit. `ExportFailed`: an argument that a bundle cannot hold.
    """
    check_type("programs", programs, (str, Program, Iterable, type(None)), "names of programs")
    check_type("variants", variants, Iterable, "a list of example calls")
    example, further = as_example(example), list(variants)
    only = only_mode(target if isinstance(target, nn.Module) else None)
    if programs is None:
        programs = _default(_call(target, example, Program("forward"), {}), only)
    specs: list[ProgramSpec] = []
    for program in map(_described, [programs] if isinstance(programs, str | Program) else programs):
        if only not in (None, program.mode):
            own = " and ".join(f"`{name}`" for name, known in NAMED.items() if known.mode == only)
            raise ModelFileInvalid(
                f"program `{program.name}` is of {program.mode} mode, and `torch.export` made the model in "
                f"{only} mode, its only one. Export the original model, or {own}"
            )
        first = example if program.example is None else as_example(program.example)
        if program.example is not None and first.dynamic_shapes is None:
            sizes = _sizes(target, "forward", example)
        else:
            sizes = _sizes(target, program.method, first)
        examples = [first, *program.variants]
        if program.example is None and program.method == "forward":
            examples += further
        for index, each in enumerate(examples):
            call = _call(target, as_example(each), program, sizes)
            mode = program.mode if call.module is not None else "function"
            method = program.method if isinstance(program.method, str) else program.method.__name__
            spec = ProgramSpec(program.name, mode, program.grad, method, call)
            specs.append(replace(spec, name=f"{spec.name}.{index + 1}", variant_of=spec.name) if index else spec)
    check_names([spec.name for spec in specs])
    return specs


def as_example(example: AnyExample) -> Example:
    """Return an example call as its record; `ModelFileInvalid`: it is no tuple, mapping or `Example`."""
    if isinstance(example, Example):
        return example
    if isinstance(example, Mapping):
        return Example(kwargs=example)
    if isinstance(example, tuple):
        return Example(example)
    raise ModelFileInvalid(
        f"an example call must be a tuple of positional arguments, a dict of keyword arguments, or an "
        f"`aotexport.Example`, got {type(example).__name__}"
    )


def _sizes(target: Any, method: str | Callable[..., Any], example: Example) -> dict[str, Any]:
    if example.dynamic_shapes is None:
        return {}
    return sizes_by_name(list(signature_of(method_of(target, method)).parameters), example.dynamic_shapes)


def method_of(target: Any, method: str | Callable[..., Any]) -> Any:
    """Return what a program calls: the target, a method of it, or a function as a method of it.

    `ModelFileInvalid`: there is no such method.
    """
    if method == "forward":
        return target
    is_name = isinstance(method, str)
    if not isinstance(target, nn.Module) or (is_name and not callable(getattr(target, method, None))):
        raise ModelFileInvalid(f"`{type(target).__name__}` has no method `{method}`")
    return getattr(target, method) if is_name else MethodType(method, target)


def _call(target: Any, example: Example, program: Program, shared: Mapping[str, Any]) -> ExampleCall:
    target = method_of(target, program.method)
    try:
        return example_call(target, example.args, dict(example.kwargs), example.dynamic_shapes, shared=shared)
    except ModelFileInvalid as error:
        if example.dynamic_shapes is not None or not shared:
            raise
        raise ModelFileInvalid(
            f"program `{program.name}`: {error}. An example without dynamic_shapes takes those of the export, by the "
            "names of its arguments; give it its own, `aotexport.Example(args, dynamic_shapes=...)`, `{}` for fixed "
            "sizes"
        ) from error


def _default(call: ExampleCall, only: str | None) -> list[str]:
    trainable = call.module is not None and any(parameter.requires_grad for parameter in call.module.parameters())
    input_grad = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in call.tensors)
    if only is not None:
        return ["train"] if only == "train" else ["infer", "eval-joint"] if trainable or input_grad else ["infer"]
    if call.module is not None and (trainable or input_grad or call.module.training):
        return ["train", "infer"]
    return ["train"] if input_grad else ["infer"]


def only_mode(module: nn.Module | None) -> Literal["train", "eval"] | None:
    """Return the mode that a module of `torch.export` was exported in, the only one that it has; None: it has both.

    Graphs do not record it. It is train mode where an operator that tells them apart, such as dropout, was traced so.
    """
    children = [] if module is None else list(module.modules())
    switches = [getattr(vars(child).get("train"), "__module__", "") for child in children]
    if "torch.export.exported_program" not in switches:
        return None
    nodes = (node for child in children if isinstance(child, GraphModule) for node in child.graph.nodes)
    return "train" if any(map(_trains, nodes)) else "eval"


def _trains(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return any(values.get(name) is True for name in ("train", "training")) or bool(values.get("dropout_p"))


def _described(program: Any) -> Program:
    if isinstance(program, Program):
        if program.mode not in ("train", "eval"):
            raise ModelFileInvalid(f"program `{program.name}`: no mode {program.mode!r}; there are train and eval")
        return program
    if program not in NAMED:
        raise ModelFileInvalid(f"no program `{program}`; there are {', '.join(NAMED)}, and `aotexport.Program`")
    return NAMED[program]


def check_names(names: list[str]) -> None:
    """Refuse names of programs that a bundle cannot have.

    `ModelFileInvalid`: there is none, one twice, or one that is no plain name.
    """
    if not names:
        raise ModelFileInvalid("no programs were asked for")
    for index, name in enumerate(names):
        if not isinstance(name, str) or not bounds_of(PlainName).takes(name):
            raise ModelFileInvalid(
                f"program name {name!r}: use letters, digits, `_`, `.` and `-`, at most 64, a letter or digit first"
            )
        if name in names[:index]:
            raise ModelFileInvalid(f"two programs are called `{name}`")


def nested_sizes(tree: trees.Tree, size_of: Callable[[trees.Leaf | trees.Constant], Any]) -> Any:
    """Return what `size_of` gives for the inputs of a tree, nested like it: sizes by axis, an integer's, or None."""
    if isinstance(tree, trees.Leaf | trees.Constant):
        return size_of(tree)
    children = [nested_sizes(item, size_of) for item in tree.items]
    if isinstance(tree, trees.Sequence):
        return tuple(children)
    return dict(zip(keys_of(tree) if isinstance(tree, trees.Mapping) else tree.fields, children, strict=True))


def scaled(dimension: Any, factor: int, offset: int) -> Any:
    """Return the dimension `factor * dimension + offset`, as `torch.export.Dim` derives it."""
    multiple = dimension if factor == 1 else factor * dimension
    return multiple + offset if offset else multiple


def affine(size: Size) -> tuple[str, int, int] | None:
    """Return symbol, factor and offset of a size `factor * symbol + offset`; None: it is none."""
    if isinstance(size, str):
        return size, 1, 0
    if not isinstance(size, SizeExpression) or size.op not in ("add", "mul") or len(size.args) != 2:
        return None
    numbers = [arg for arg in size.args if isinstance(arg, int)]
    others = [affine(arg) for arg in size.args if isinstance(arg, str | SizeExpression)]
    if len(numbers) != 1 or len(others) != 1 or others[0] is None:
        return None
    (symbol, factor, offset), number = others[0], numbers[0]
    return (symbol, factor, offset + number) if size.op == "add" else (symbol, factor * number, offset * number)
