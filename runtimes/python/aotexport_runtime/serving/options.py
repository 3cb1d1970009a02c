"""Options of a servable, which are among those of the server. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.schema.limits import DEFAULT, Limits
from aotexport_runtime.values.arguments import check_type


@dataclass(frozen=True, kw_only=True)
class ServableOptions:
    """How a servable loads and calls a bundle: the keywords of `Servable`.

    Attributes:
        engine: target of `load`; `onnx` and `openvino` need no torch; None: `auto`.
        device: where models run, see `load`.
        threads: threads of an operator; None: as torch or the runtime chooses.
        priority: of its threads beside other models', as `nice` has it on Linux: 0 (first) to 19.
        max_batch_size: greatest joined batch; 1: none is joined.
        pad: name of a dynamic size, such as the length of a text: calls of up to twice the length are joined, with
            zeros after the shorter, where the graph and recorded calls show that no answer changes.
        max_latency_ms: how long a call waits for others; 0: no longer than the calls before it take.
        max_waiting: most calls that wait for a model.
        max_tokens: of a model that generates text: most tokens of a prompt with its answer, within the model's own.
        trust: native: run native files as well; see `load`.
        mapped: map weights, so that processes share them; nobody may write into files that are served; see `load`.
        precision: of layers of float32: bfloat16, where the processor has its instructions and recorded calls agree to
            4e-2; see `frozen` of `load`.
        limits: the most that a bundle may ask for, by the names of `Limits`.
        adapters: directories of LoRA adapters (of `save_adapter` or of peft) by name, which calls may ask for; a bundle
            with adapters runs its forward graph.
    """

    engine: str | None = None
    device: str = "cpu"
    threads: int | None = None
    priority: int = 0
    max_batch_size: int = 32
    pad: str | None = None
    max_latency_ms: float = 0.0
    max_waiting: int = 1024
    max_tokens: int = 4096
    trust: Literal["data", "native"] = "data"
    mapped: bool | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    limits: Limits = DEFAULT
    adapters: Mapping[str, str | os.PathLike[str]] | None = None

    LEAST: ClassVar[dict[str, float]] = {
        "threads": 1,
        "priority": 0,
        "max_batch_size": 1,
        "max_latency_ms": 0.0,
        "max_waiting": 1,
        "max_tokens": 1,
    }
    """Least values of numbers; of those that are integers, as integers."""

    def __post_init__(self) -> None:
        """Refuse a number below its least (`ArgumentInvalid`)."""
        for name, least in self.LEAST.items():
            value = vars(self)[name]
            if (value, getattr(type(self), name)) == (None, None):
                continue
            types, expected = (int, "an integer") if isinstance(least, int) else ((int, float), "a number")
            check_type(self.shown(name), value, types, expected)
            if value < least:
                raise ArgumentInvalid(f"`{self.shown(name)}`: expected at least {least:g}, got {value}")
        if self.precision != "float32" and (self.engine not in (None, "auto") or self.mapped or self.adapters):
            others = ", ".join(f"`{self.shown(name)}`" for name in ("engine", "mapped", "adapters"))
            raise ArgumentInvalid(
                f"`{self.shown('precision')}`: {self.precision} computes by copies of the weights that engine `auto` "
                f"makes. Leave out {others}"
            )

    def shown(self, name: str) -> str:
        """Return the name of a field as errors have it."""
        return name
