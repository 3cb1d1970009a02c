"""The class of a loaded module: it shows the model's name, and methods with the captured signatures, to trainers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from keyword import iskeyword
from types import FunctionType
from typing import Any

from torch import nn

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.schema import trees
from aotexport_runtime.schema.manifest import TRANSFORMERS
from aotexport_runtime.schema.program import Parameter, Program
from aotexport_runtime.submodules.python_state import ARGUMENT
from aotexport_runtime.submodules.submodule import Sliced
from aotexport_runtime.values.trees import builder, keys_of

ValueOf = Callable[[trees.Constant], Any]
"""The value of a constant leaf."""

_EMPTY = inspect.Parameter.empty


def methods_of(bundle: Bundle, *, variants: bool = False) -> dict[str, list[Program]]:
    """Return the programs per method; with `variants`, also those that are variants of others."""
    methods: dict[str, list[Program]] = {}
    for entry in bundle.manifest.programs:
        if variants or entry.variant_of is None:
            program = bundle.program(entry.name)
            methods.setdefault(program.method, []).append(program)
    return methods


def class_of(base: type[Any], bundle: Bundle, environment: Environment, call: Callable[..., Any]) -> type[Any]:
    """Return a subclass of `base` that looks like the class of the model that the bundle was exported from.

    Its name is the model's, where that is an identifier. It has every method that the bundle has programs of, which
    calls `call(module, method, *args, **kwargs)`, and every attribute with a value in the bundle, unless `base` has it;
    `forward` is the code of `base` with another signature.
    """
    # Items of a `Sequential` have indices.
    is_sequential = any(record.name == "" and record.type == "Sequential" for record in bundle.manifest.modules)
    bases = (base, Sliced, nn.Sequential) if is_sequential else (base,)
    if TRANSFORMERS in bundle.manifest.extensions:
        from aotexport_runtime.generation.language_model import LanguageModel

        bases = (LanguageModel, *bases)
    namespace: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}

    def value_of(leaf: trees.Constant) -> Any:
        return constant_value(leaf.value, environment)

    settings = {name: leaf for name, leaf in bundle.manifest.settings.items() if leaf is not None}
    namespace |= {name: value_of(leaf) for name, leaf in settings.items() if not hasattr(base, name)}
    hidden = ARGUMENT if bundle.manifest.attributes else None
    for method, programs in methods_of(bundle, variants=True).items():
        signature = signature_of(programs, value_of, hidden)
        if method == "forward":
            own = bases[0].forward
            code = FunctionType(own.__code__, own.__globals__, closure=own.__closure__)
            code.__doc__ = own.__doc__
            namespace[method] = _shown(code, method, signature)
        elif not hasattr(base, method):
            namespace[method] = _shown(_caller(method, call), method, signature)
    name = bundle.manifest.name
    return type(name if _is_name(name) else base.__name__, bases, namespace)


def _is_name(text: str) -> bool:
    return text.isidentifier() and not iskeyword(text)


def _caller(method: str, call: Callable[..., Any]) -> Any:
    def caller(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call(self, method, *args, **kwargs)

    caller.__doc__ = f"Call the program of `{method}` of the current mode."
    return caller


def _shown(function: Any, name: str, signature: inspect.Signature) -> Any:
    parameters = list(signature.parameters.values())
    of_module = "_module" if "self" in signature.parameters else "self"
    kind = parameters[0].kind if parameters else inspect.Parameter.POSITIONAL_OR_KEYWORD
    kind = min(kind, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.Signature([inspect.Parameter(of_module, kind), *parameters])
    return function


def signature_of(programs: Sequence[Program], value_of: ValueOf, hidden: str | None = None) -> inspect.Signature:
    """Return the signature of a method, from the parameters of its programs, without the one named `hidden`.

    Names and kinds are those of the user's code. The keywords of the example replace `**kwargs`, since a call can pass
    no others; `*args` is left out where the example passed none. A default is the user's, even where calls must pass
    the argument; it is `...` where the bundle does not know it, or some programs lack the parameter.
    """
    shown: dict[str, list[inspect.Parameter]] = {}
    for program in programs:
        for parameter in program.parameters:
            for each in _parameters(parameter, value_of):
                if each.name != hidden:
                    shown.setdefault(each.name, []).append(each)
    merged = [_merged(alike, len(programs)) for alike in shown.values()]
    return inspect.Signature(_with_defaults(sorted(merged, key=lambda parameter: parameter.kind)))


def _parameters(parameter: Parameter, value_of: ValueOf) -> list[inspect.Parameter]:
    """Return the parameters of the signature for one of a program."""
    if isinstance(parameter.tree, trees.Mapping) and parameter.kind == "var_keyword":
        names = [key for key in keys_of(parameter.tree) if isinstance(key, str) and _is_name(key)]
        return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    kind = getattr(inspect.Parameter, parameter.kind.upper())
    if isinstance(parameter.tree, trees.Sequence) and parameter.kind == "var_positional":
        return [inspect.Parameter(parameter.name, kind)] if parameter.tree.items else []
    default = parameter.tree if parameter.optional else parameter.default
    value = _EMPTY if default is None else builder(default, value_of)([])
    return [inspect.Parameter(parameter.name, kind, default=value)]


def _merged(alike: list[inspect.Parameter], programs: int) -> inspect.Parameter:
    """Return one parameter for those of several programs; it has a default if one of them has one, or lacks it."""
    merged = next((parameter for parameter in alike if parameter.default is not _EMPTY), alike[0])
    if merged.default is not _EMPTY or merged.kind is inspect.Parameter.VAR_POSITIONAL or len(alike) == programs:
        return merged
    return merged.replace(default=...)


def _with_defaults(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Give a default to positional parameters that follow one with a default, as Python requires."""
    result: list[inspect.Parameter] = []
    has_default = False
    for parameter in parameters:
        positional = parameter.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD
        has_default = positional and (has_default or parameter.default is not _EMPTY)
        needs = has_default and parameter.default is _EMPTY
        result.append(parameter.replace(default=...) if needs else parameter)
    return result
