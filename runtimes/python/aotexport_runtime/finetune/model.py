"""A loaded bundle as the loop calls it: a batch of named tensors in, named tensors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.call.flat_call import arguments_of, flat_outputs
from aotexport_runtime.errors import DataInvalid, NotSupported
from aotexport_runtime.finetune.table import listed
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.compose import program_of
from aotexport_runtime.module.module_class import methods_of
from aotexport_runtime.schema.program import ArgumentInput, Program
from aotexport_runtime.serving.interface import Interface, TensorSpec, interface_of

Batch = Mapping[str, torch.Tensor]
Call = Callable[[Batch], dict[str, torch.Tensor]]

OWN_TARGET = "labels"
"""The input by which a model computes its loss itself."""
POSITIONS = "position_ids"
"""The input by which a model keeps apart sequences that are packed in a row."""
OWN_LOSS = "loss"
"""The output that is this loss."""


class Model:
    """The program for training of a loaded bundle, and the one for evaluation.

    `sizes` are the least and greatest number of examples of a call, `arguments` gives those of a batch, for training.
    """

    def __init__(self, module: BundleModule, *, validates: bool, packed: bool = False) -> None:
        """Look at the programs, at one for evaluation too if it `validates`; at those of `packed` sequences, if wanted.

        `NotSupported`: the bundle has no program for training or for evaluation, or needs numbers.
        """
        self.module = module
        programs, interface = _programs(
            module,
            lambda names: not packed or (POSITIONS in names and "attention_mask" not in names),
            f"--pack: no program for training takes `{POSITIONS}` that keep packed rows apart. Export the model by "
            "--recipe causal-lm-packed, or leave --pack out",
            training=True,
        )
        number = next((spec.name for spec in interface.inputs if spec.is_number or not spec.shape), None)
        if number is not None:
            raise NotSupported(f"input `{number}` is no tensor of a row per example. Write the loop yourself: `load`")
        self.inputs = {spec.name: spec for spec in interface.inputs}
        self._program = programs[0]
        first = next(iter(self.inputs.values()), None)
        if first is None:
            raise NotSupported("the bundle takes no tensors, and so no examples")
        self.sizes = self.sizes_of(first, 0)
        self.arguments = _arguments(module, programs[0], interface)
        self._calls: dict[bool, Call] = {True: _call(module, programs[0], interface)}
        if validates:
            programs, interface = _programs(
                module,
                lambda names: names == [*self.inputs],
                f"no program for evaluation takes {listed(self.inputs)}, as the one for training does; or hold no "
                "examples out: --validation 0",
                training=False,
            )
            self._calls[False] = _call(module, programs[0], interface)

    def sizes_of(self, spec: TensorSpec, axis: int) -> tuple[int, int | None]:
        """Return the least and the greatest size of an input; None: there is no greatest."""
        size = self.size(spec, axis)
        if isinstance(size, int):
            return size, size
        found = [each for each in self._program.dimensions if each.symbol == size]
        return (found[0].min or 1, found[0].max) if found else (1, None)

    def size(self, spec: TensorSpec, axis: int) -> Any:
        """Return a size of an input as the program has it: two that are equal are the same in every call."""
        value = self._program.inputs[spec.index]
        assert isinstance(value, ArgumentInput)
        return value.meta.shape[axis]

    def call(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the outputs of a batch by name, of the program of the module's mode."""
        return self._calls[self.module.training](batch)


def _arguments(
    module: BundleModule, program: Program, interface: Interface
) -> Callable[[Batch], tuple[tuple[Any, ...], dict[str, Any]]]:
    arguments = arguments_of(program)
    return lambda batch: arguments([batch[spec.name] for spec in interface.inputs], module.state_tensors())


def _call(module: BundleModule, program: Program, interface: Interface) -> Call:
    arguments, tree = _arguments(module, program, interface), program.output_tree
    names = [spec.name for spec in interface.outputs]

    def call(batch: Batch) -> dict[str, torch.Tensor]:
        args, kwargs = arguments(batch)
        return dict(zip(names, (value for _, value in flat_outputs(tree, module(*args, **kwargs))), strict=True))

    return call


def _programs(
    module: BundleModule, fits: Callable[[list[str]], bool], missing: str, *, training: bool
) -> tuple[list[Program], Interface]:
    """Return a mode's first program of `forward` whose inputs fit, and its variants of the same inputs and outputs."""
    with torch.set_grad_enabled(training):
        base = program_of("forward", methods_of(module.bundle), training=training)
    programs = [module.bundle.program(name) for name in module.bundle.manifest.with_variants(base)]
    interfaces = [interface_of([program]) for program in programs]
    first = next((each for each in interfaces if fits([spec.name for spec in each.inputs])), None)
    if first is None:
        raise NotSupported(missing)
    alike = [p for p, each in zip(programs, interfaces, strict=True) if _names(each) == _names(first)]
    return alike, interface_of(alike)


def _names(interface: Interface) -> list[str]:
    return [spec.name for spec in (*interface.inputs, *interface.outputs)]


def chosen(
    outputs: Mapping[str, torch.Tensor], name: str | None, usual: str, axes: Sequence[int], what: str
) -> torch.Tensor:
    """Return the output that a loss reads.

    Args:
        outputs: by name.
        name: the user's choice; None: the one that is named `usual`, or the only one that fits.
        usual: name that it often has.
        axes: numbers of axes that it may have.
        what: what it is, with its axes, for messages.

    `DataInvalid`: there is none, or there are several.
    """
    fitting = {key: value for key, value in outputs.items() if value.is_floating_point() and value.dim() in axes}
    if name is None:
        name = usual if usual in fitting else next(iter(fitting)) if len(fitting) == 1 else None
    if name not in fitting:
        shapes = ", ".join(f"`{key}` {list(value.shape)}" for key, value in outputs.items())
        named = "one output" if name is None else f"`{name}`"
        raise DataInvalid(f"expected {named} to be {what}; the outputs are {shapes}. Choose one: --result NAME")
    return fitting[name]
