"""Native code of an inference graph that holds copies of the weights: it serves while these are as they were loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotexport_runtime.engines.engine import Native
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.guards.arguments import same_layout
from aotexport_runtime.schema.program import FreshOutput, Program, SizeInput, StateInput
from aotexport_runtime.schema.values import TensorMeta
from aotexport_runtime.values import sizes

Weights = Mapping[str, tuple[torch.Tensor, int]]
"""State tensors as they were loaded, and their versions then, by name."""


class Frozen(Native):
    """Runs an inference graph while the weights are those that were loaded.

    Attributes:
        failure: what it said the last time that it failed; empty: it did not.
    """

    def __init__(self, program: Program, weights: Weights) -> None:
        """Note the weights.

        Raises:
            NotSupported: the program does more than its graph, or changes of its weights would not be seen.
        """
        functional = program.functional
        assert functional is not None
        fresh = all(isinstance(output, FreshOutput) for output in functional.outputs)
        if not fresh or any(not isinstance(spec, SizeInput) and spec.subclass is not None for spec in program.inputs):
            raise NotSupported("it gives values alone, and the program views, or tensors of classes")
        states = [(index, spec.name) for index, spec in enumerate(program.inputs) if isinstance(spec, StateInput)]
        if any(name not in weights for _, name in states):
            raise NotSupported(
                "the module is a copy, or was loaded in inference mode, and changes of its weights would not be seen"
            )
        self.failure = ""
        self._weights = [(index, *weights[name]) for index, name in states]
        self._threads = torch.get_num_threads()
        self._strides = [meta.stride if isinstance(meta, TensorMeta) else None for meta in program.outputs]

    def why_not(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> str | None:
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms were asked for"
        if torch.get_num_threads() != self._threads:
            return f"it was made for {self._threads} threads"
        same = all(inputs[index] is tensor and tensor._version == version for index, tensor, version in self._weights)
        return None if same else "weights have changed since the load"

    def laid_out(self, results: Sequence[Any], symbols: Mapping[str, int]) -> tuple[Any, ...]:
        """Return results with the strides that eager gives them."""
        return tuple(_laid_out(*pair, symbols) for pair in zip(results, self._strides, strict=True))


def _laid_out(result: Any, stride: Sequence[Any] | None, symbols: Mapping[str, int]) -> Any:
    if stride is None or not isinstance(result, torch.Tensor):
        return result
    expected = [sizes.evaluate(step, symbols) for step in stride]
    if same_layout(result.shape, result.stride(), expected):
        return result
    count = 1 + sum((size - 1) * step for size, step in zip(result.shape, expected, strict=True))
    if count >= result.numel() or not result.numel():
        return torch.empty_strided(result.shape, expected, dtype=result.dtype).copy_(result)
    # Several elements are one in memory, as those of an expanded tensor.
    memory = result.new_empty(count)
    memory[torch.arange(count).as_strided(result.shape, expected)] = result
    return memory.as_strided(result.shape, expected)
