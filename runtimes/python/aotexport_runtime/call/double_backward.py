"""Double backward of a joint graph: the forward graph runs the call again, and autograd differentiates that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from aotexport_runtime.call.joint import JointProgram
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.program import IntermediateAlias


class RepeatableCall(NamedTuple):
    """A call that the forward graph can run again, for double backward.

    Attributes:
        joint: the program.
        inputs: inputs with their values before the call.
        versions: versions of the inputs `joint.steady`; empty: inference tensors have none.
        symbols: value per symbol.
        random_state: state of the random generator before the call; None: the call draws nothing.
    """

    joint: JointProgram
    inputs: Sequence[Any]
    versions: list[int]
    symbols: dict[str, int]
    random_state: torch.Tensor | None

    @classmethod
    def of(cls, joint: JointProgram, inputs: Sequence[Any], symbols: dict[str, int]) -> RepeatableCall:
        """Record a call that is about to run."""
        if joint.mutated:
            inputs = list(inputs)
            for index in joint.mutated:
                inputs[index] = inputs[index].clone()
        try:
            versions = [inputs[index]._version for index in joint.steady]
        except RuntimeError:
            versions = []  # Inference tensors.
        return cls(joint, inputs, versions, symbols, torch.get_rng_state() if joint.draws else None)

    def gradients(self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return differentiable gradients of the inputs.

        Raises:
            NotSupported: an input was changed since the call; eager would not read it again.
        """
        assert self.joint.reference is not None
        for index, version in zip(self.joint.steady, self.versions, strict=False):
            if self.inputs[index]._version != version:
                raise NotSupported(
                    f"double backward computes the call anew, and its `{self.joint.graph.inputs[index].name}` was "
                    "changed in place since. Load the bundle with target='autograd'"
                )
        with torch.random.fork_rng(enabled=self.random_state is not None):
            if self.random_state is not None:
                torch.set_rng_state(self.random_state)
            # Hooks of the inputs run when this result reaches them, and must not run here as well.
            inputs = [
                value.view_as(value) if needs else value for value, needs in zip(self.inputs, needed, strict=True)
            ]
            arguments = list(inputs)
            for index in self.joint.mutated:
                arguments[index] = arguments[index].clone()
            outputs = self._as_returned(self.joint.reference(arguments, self.symbols))
        wanted = [value for value, needs in zip(inputs, needed, strict=True) if needs]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        return [next(found) if needs else None for needs in needed]

    def _as_returned(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs in the order of the joint graph's forward: None per mutation, outputs, bases of views."""
        functional = self.joint.functional
        bases: list[Any] = [None] * functional.intermediate_bases
        for spec, output in zip(functional.outputs, outputs, strict=True):
            if isinstance(spec, IntermediateAlias) and output._base is not None:
                bases[spec.base_index] = output._base
        return [*[None] * len(functional.mutations), *outputs, *bases]
