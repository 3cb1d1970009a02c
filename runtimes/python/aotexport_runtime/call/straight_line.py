"""Source of generated functions that take a program's usual calls, shared by the engines. No torch.

What they check, signature and guards check as well; they turn away whatever those would have to look at twice. The
source holds positions and integers alone; whatever the bundle says stands in a table of constants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aotexport_runtime.engines.source import define
from aotexport_runtime.schema.program import ArgumentInput, Program, SizeInput
from aotexport_runtime.schema.sizes import Dimension, Size
from aotexport_runtime.values import sizes

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""`(args, kwargs) -> what the call returns`."""


def serves(program: Program, leaves: Collection[int] | None) -> bool:
    """Return whether the calls of a program are plain enough: each argument a plain tensor, nothing else looked at.

    Args:
        program: its record.
        leaves: inputs that calls pass, see `Signature.plain_leaves`.
    """
    arguments = {index: spec for index, spec in enumerate(program.inputs) if isinstance(spec, ArgumentInput)}
    if leaves is None or set(leaves) != arguments.keys() or set(program.fixed) - {"autocast"}:
        return False
    has_sizes = any(isinstance(spec, SizeInput) for spec in program.inputs)
    return not has_sizes and all(spec.subclass is None for spec in arguments.values())


def input_name(index: int) -> str:
    """Return the name of the variable that holds a program's input."""
    return f"v{index}"


@dataclass
class Writer:
    """Source under construction, with the constants that it refers to and the sources of symbols."""

    lines: list[str] = field(default_factory=list[str])
    scope: dict[str, Any] = field(default_factory=dict[str, Any])
    symbols: dict[str, str] = field(default_factory=dict[str, str])

    def constant(self, value: Any) -> str:
        """Return the name of a constant."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def refuse_if(self, condition: str) -> None:
        """Turn away the calls for which `condition` holds."""
        self.lines.append(f"if {condition}: return otherwise(args, kwargs)")

    def size(self, size: Size) -> str:
        """Return the source of a size."""
        return sizes.source(size, self.symbols.__getitem__)

    def shape(self, shape: Sequence[Size]) -> str:
        """Return the source of a tuple of sizes."""
        if all(isinstance(size, int) for size in shape):
            return self.constant(tuple(shape))
        return f"({''.join(f'{self.size(size)}, ' for size in shape)})"

    def bind(self, leaves: Sequence[int] | None, keywords: Mapping[str, int] | None = None) -> None:
        """Take the arguments of a call that passes all by position, or all by name.

        Args:
            leaves: input per positional argument; None: calls by position are turned away.
            keywords: input per name; None: calls by name are turned away.
        """
        count = -1 if leaves is None else len(leaves)
        taken = f"{', '.join(map(input_name, leaves))}, = args" if leaves else ""
        if not keywords:
            self.refuse_if(f"kwargs or len(args) != {count}")
            self.lines += [taken] if taken else []
            return
        values = ", ".join(f"kwargs[{self.constant(name)}]" for name in keywords)
        self.lines += [
            "if kwargs:",
            f"    if args or len(kwargs) != {len(keywords)}: return otherwise(args, kwargs)",
            f"    try: {', '.join(map(input_name, keywords.values()))}, = {values},",
            "    except KeyError: return otherwise(args, kwargs)",
            f"elif len(args) != {count}: return otherwise(args, kwargs)",
        ]
        self.lines += [f"else: {taken}"] if taken else []

    def check_sizes(self, program: Program, leaves: Sequence[int]) -> None:
        """Bind the symbols, and check shapes and the guards over them; ranks are right already."""
        for number, dimension in enumerate(program.dimensions):
            self._bind_symbol(dimension, number)
        for index in leaves:
            spec = program.inputs[index]
            assert isinstance(spec, ArgumentInput)
            self.refuse_if(f"{input_name(index)}.shape != {self.shape(spec.meta.shape)}")
        for guard in program.guards:
            self.refuse_if(f"not {self.size(guard)}")

    def _bind_symbol(self, dimension: Dimension, number: int) -> None:
        symbol = f"s{number}"
        self.lines.append(f"{symbol} = {input_name(dimension.input_index)}.shape[{int(dimension.axis)}]")
        if dimension.factor != 1 or dimension.offset != 0:
            factor, offset = int(dimension.factor), int(dimension.offset)
            self.lines.append(f"{symbol}, remainder = divmod({symbol} - ({offset}), {factor})")
            self.refuse_if("remainder")
        if dimension.min is not None:
            self.refuse_if(f"{symbol} < {int(dimension.min)}")
        if dimension.max is not None:
            self.refuse_if(f"{symbol} > {int(dimension.max)}")
        self.symbols[dimension.symbol] = symbol

    def guarded(self) -> None:
        """Turn away the calls for which a size of what was written so far has no value."""
        if self.symbols:
            undefined = self.constant(sizes.UNDEFINED)
            checks = [f"    {line}" for line in self.lines]
            self.lines = ["try:", *checks, f"except {undefined}: return otherwise(args, kwargs)"]

    def function(self, otherwise: Call, label: str) -> Call:
        """Return the function; `otherwise` takes the calls that it turns away."""
        scope = {**sizes.SCOPE, **self.scope, "otherwise": otherwise}
        return define("call", "args, kwargs", self.lines, scope, label)
