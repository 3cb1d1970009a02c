"""Encode the submodules of a module, by path, and by class where torch has the class."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import FunctionType
from typing import Any

from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.source_lines import is_library_file, is_user_file
from aotexport.model.structure import tree_of
from aotexport.process.objects import is_a
from aotexport_runtime.allowed.modules import KNOWN, is_own_attribute
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.schema.manifest import Submodule
from aotexport_runtime.schema.trees import Constant, Tree
from aotexport_runtime.submodules.submodule import LoadedSubmodule
from aotexport_runtime.values.structure import encode_constant, is_constant

_OWN = vars(nn.Module()).keys()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def encode_submodules(module: nn.Module | None) -> tuple[Submodule, ...]:
    """Return the records of a module and its submodules; none for a function."""
    if module is None:
        return ()
    first: dict[int, str] = {}
    records: list[Submodule] = []
    for path, child in module.named_modules(remove_duplicate=False):
        if id(child) in first:
            records.append(Submodule(name=path, same_as=first[id(child)]))
            continue
        first[id(child)] = path
        attributes = _known_attributes(child) if child.training == module.training else None
        type_ = None if attributes is None else _class_of(child).__name__
        absent = tuple(name for table in (child._parameters, child._buffers) for name in table if table[name] is None)
        records.append(Submodule(name=path, type=type_, attributes=attributes, absent=absent))
    return tuple(records)


def _known_attributes(module: nn.Module) -> Tree | None:
    """Return the attributes of a module that behaves exactly as its class in `torch.nn`; None: it may not."""
    class_ = _class_of(module)
    name = class_.__name__
    if name not in KNOWN or class_ is not getattr(nn, name, None):
        return None
    if "forward" in vars(module) or any(getattr(module, table) for table in _HOOKS):
        return None
    attributes = {key: value for key, value in vars(module).items() if is_own_attribute(key)}
    try:
        return tree_of(attributes, name, lambda value, path: None, role="input")
    except (ExportFailed, AssertionError):
        return None


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; for a part of a loaded bundle, the class of torch that it replaces."""
    return module.stands_for() if isinstance(module, LoadedSubmodule) else type(module)


def settings_of(module: nn.Module | None, asked: Collection[str]) -> dict[str, Constant | None]:
    """Return the attributes that a module's code may read, with plain values: its own, its class's, `asked` in vain."""
    if module is None:
        return {}
    if isinstance(module, BundleModule):
        return module.bundle.manifest.settings
    inherited = dir(nn.Module)
    own = [name for name in vars(module) if name not in _OWN]
    of_class = {name: inspect.getattr_static(type(module), name, None) for name in dir(type(module))}
    data = [name for name, value in of_class.items() if not callable(value) and not is_a(value, classmethod)]
    shared = [*data, *(name for name, value in of_class.items() if _is_users(value))]
    found = {name for name in (*own, *shared, *asked) if not name.startswith("_") and name not in inherited}
    names = sorted(found - {*module._parameters, *module._buffers, *module._modules})
    return {name: _plain(inspect.getattr_static(module, name, object())) for name in names}


def _is_users(value: Any) -> bool:
    """Return whether a value is a function of the user's own files, which packages do not replace."""
    function = value.__func__ if is_a(value, staticmethod, classmethod) else value
    file = function.__code__.co_filename if is_a(function, FunctionType) else __file__
    return is_user_file(file) and not is_library_file(file)


def _plain(value: Any) -> Constant | None:
    """Return a number, flag, None or name as a constant; None for other text, which may hold paths of this machine."""
    is_text = is_a(value, str) and not value.isidentifier()
    return Constant(value=encode_constant(value)) if is_constant(value) and not is_text else None
