"""Load the source of an export from a model file, and tell the lines to write when something is missing."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from aotexport.errors import ModelFileInvalid
from aotexport.model.call import signature_of
from aotexport.model.checkpoint import give_weights, parameters_without_memory
from aotexport.model.exported_program import exported_source
from aotexport.model.model_file import ModelFile, importable, open_model_file, user_code
from aotexport.model.programs import Example, ModelSource, Program, as_example
from aotexport.process.objects import is_a

_MISSING = object()


def load_source(where: str, weights: Path | None = None) -> ModelSource:
    """Run a model file and return its model, example and options.

    `where` is `model.py`, `model.py:attr`, `package.module:attr`, or a `.pt2` file, whose code is torch's. `weights` is
    a checkpoint that has the weights of the model, see `give_weights`; None: the model has them. `ModelFileInvalid`:
    the file is not there, its code raises, a required name is missing or wrong, or the checkpoint does not fit the
    model.
    """
    if where.endswith(".pt2"):
        if weights is not None:
            raise ModelFileInvalid(f"`{where}` has weights of its own; `--weights` is for a model file")
        return exported_source(where)
    with contextlib.nullcontext() if weights is None else parameters_without_memory():
        file = open_model_file(where)
        with importable(file.root):
            target = _target(file)
    with importable(file.root):
        if weights is not None:
            if not isinstance(target, nn.Module):
                raise ModelFileInvalid(f"`{file.name}` has a function, and weights are those of an nn.Module")
            give_weights(target, weights)
        args, kwargs = _example(file, target)
        example = Example(args, kwargs, _dynamic_shapes(file))
        programs, variants = None, _variants(file)
        if getattr(file.module, "programs", None) is not None:
            wanted = 'a list of names, like ["train", "infer"], and of `aotexport.Program`'
            programs = _list(file, "programs", (str, Program), wanted)
        _import_custom_ops(file)
        wanted = 'a list of names of custom operators, like ["my_ops::scale"]'
        kept = _list(file, "keep_operators", (str,), wanted)
        return ModelSource(file.name, target, example, file.root, programs, variants, kept)


def load_target(where: str) -> tuple[Any, Path]:
    """Run a model file, see `load_source`; return its model, and the directory that its own imports are relative to."""
    file = open_model_file(where)
    with importable(file.root):
        return _target(file), file.root


# --- the model --------------------------------------------------------------------------------------------


def _target(file: ModelFile) -> nn.Module | Callable[..., Any]:
    found = reduce(lambda owner, name: getattr(owner, name, _MISSING), file.attribute.split("."), file.module)
    if found is _MISSING:
        raise ModelFileInvalid(_no_model(file))
    if isinstance(found, nn.Module):
        return found
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise ModelFileInvalid(f"`{file.attribute}` in `{file.name}` is a class, and no nn.Module")
    if not callable(found):
        raise ModelFileInvalid(
            f"`{file.attribute}` in `{file.name}` is of type {type(found).__name__}; it must be an nn.Module, a class "
            "or function without required arguments that returns one, or a function of tensors"
        )
    return _made(file, found)


def _made(file: ModelFile, callable_: Callable[..., Any]) -> nn.Module | Callable[..., Any]:
    """Return the module that a class or factory makes, or the function itself if it is one of tensors.

    A callable without required arguments that returns a module is a factory; others are functions of tensors.
    """
    try:
        parameters = list(inspect.signature(callable_).parameters.values())
    except (ValueError, TypeError):
        return callable_
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic]
    shown = file.attribute
    if required:
        if isinstance(callable_, type):
            arguments = ", ".join(f"{name}=..." for name in required)
            raise ModelFileInvalid(
                f"`{shown}` in `{file.name}` needs the arguments {', '.join(required)}. Add the line\n\n"
                f"    model = {callable_.__name__}({arguments})"
            )
        return callable_
    doing = f"calling `{shown}()` of `{file.name}`, to see whether it makes a module,"
    with user_code(doing, file.root):
        made = callable_()
    if isinstance(made, nn.Module):
        return made
    if made is None and not parameters:
        raise ModelFileInvalid(f"`{shown}()` in `{file.name}` returned None; it must return an nn.Module")
    return callable_


def _no_model(file: ModelFile) -> str:
    values = vars(file.module).items()
    own = [(name, value) for name, value in values if is_a(value, type) and value.__module__ == file.module.__name__]
    classes = [name for name, value in own if issubclass(value, nn.Module)]
    others = [name for name, value in values if is_a(value, nn.Module)] + classes
    line = f"    {file.attribute} = {classes[0] if classes else 'MyModule'}()"
    also = f"\n\nor name what it has: {', '.join(f'{file.name}:{name}' for name in others)}" if others else ""
    return f"`{file.name}` has no `{file.attribute}`{_guarded(file)}. Add the line\n\n{line}{also}"


def _guarded(file: ModelFile) -> str:
    """Return a clause on a block of the file that is for scripts, if it has one."""
    source = getattr(file.module, "__file__", None)
    if source is None or "__main__" not in Path(source).read_text(errors="replace"):
        return ""
    return ' outside of the block under `if __name__ == "__main__":`, which an export does not run'


# --- the example ------------------------------------------------------------------------------------------


def _example(file: ModelFile, target: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = getattr(file.module, "example_inputs", _MISSING)
    kwargs = _keywords("example_kwargs", file, getattr(file.module, "example_kwargs", None) or {})
    if inputs is _MISSING and kwargs:
        return (), kwargs
    if inputs is _MISSING:
        raise ModelFileInvalid(
            f"`{file.name}` has no `example_inputs`. Add the arguments of one call, for example\n\n"
            f"    {_example_line(target)}\n\n"
            "as a dict of keyword arguments, a tuple of positional ones, or a function that returns either"
        )
    if callable(inputs):
        with user_code(f"calling `example_inputs()` of `{file.name}`", file.root):
            inputs = inputs()
    if isinstance(inputs, torch.Tensor):
        return (inputs,), kwargs
    if isinstance(inputs, tuple):
        return tuple(inputs), kwargs
    if isinstance(inputs, Mapping):
        twice = sorted(set(inputs) & set(kwargs))
        if twice:
            raise ModelFileInvalid(f"`{file.name}`: `{twice[0]}` is in example_inputs and in example_kwargs")
        return (), {**_keywords("example_inputs", file, inputs), **kwargs}
    raise ModelFileInvalid(
        f"`example_inputs` in `{file.name}` is of type {type(inputs).__name__}; it must be a tuple of positional "
        "arguments, a dict of keyword arguments, or a function that returns either. For one argument, write\n\n"
        "    example_inputs = (value,)"
    )


def _example_line(target: Any) -> str:
    signature = signature_of(target)
    empty = inspect.Parameter.empty
    names = [p.name for p in signature.parameters.values() if p.default is empty and p.kind.name.endswith("KEYWORD")]
    names = [name for name in names if signature.parameters[name].kind.name != "VAR_KEYWORD"]
    if not names:
        return "example_inputs = (torch.randn(2, 8),)" if signature.parameters else "example_inputs = ()"
    return "example_inputs = {" + ", ".join(f'"{name}": torch.randn(2, 8)' for name in names) + "}"


def _keywords(name: str, file: ModelFile, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ModelFileInvalid(f"`{name}` in `{file.name}` must be a dict from parameter names to values")
    return dict(value)


# --- the rest ---------------------------------------------------------------------------------------------


def _dynamic_shapes(file: ModelFile) -> Any:
    value = getattr(file.module, "dynamic_shapes", None)
    if value is not None and not isinstance(value, dict | tuple | list):
        raise ModelFileInvalid(
            f"`dynamic_shapes` in `{file.name}` is of type {type(value).__name__}; it must be a dict nested like the "
            "arguments. For example\n\n"
            '    dynamic_shapes = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}'
        )
    return value


def _variants(file: ModelFile) -> tuple[Example, ...]:
    value = getattr(file.module, "variants", ())
    if not isinstance(value, list | tuple):
        raise ModelFileInvalid(
            f"`variants` in `{file.name}` is of type {type(value).__name__}; it must be a list of further example "
            "calls, each a tuple of positional arguments, a dict of keyword arguments, or an `aotexport.Example`"
        )
    return tuple(map(as_example, value))


def _import_custom_ops(file: ModelFile) -> None:
    for item in _list(file, "custom_ops", (str, ModuleType), 'a list of modules to import, like ["my_ops"]'):
        name = item.__name__ if isinstance(item, ModuleType) else item
        with user_code(f"importing `{name}`, which `custom_ops` of `{file.name}` names,", file.root):
            importlib.import_module(name)


def _list(file: ModelFile, name: str, kinds: tuple[type, ...], wanted: str) -> tuple[Any, ...]:
    """Return a list of a file, also of one item alone; empty: the file has none."""
    value: Any = getattr(file.module, name, ())
    items = (value,) if isinstance(value, kinds) else value
    if not isinstance(items, Iterable) or not all(isinstance(item, kinds) for item in items):
        raise ModelFileInvalid(f"`{name}` in `{file.name}` must be {wanted}")
    return tuple(items)
