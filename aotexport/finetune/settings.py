"""What a run of fine-tuning was asked for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Loss = Literal["classification", "causal-lm", "pairs"]
Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A LoRA adapter, see `aotexport_runtime.adapters.add_lora`.

    Attributes:
        r: rank.
        alpha: numerator of the scaling.
        dropout: probability of dropout of the adapter's input.
        rslora: scale by `alpha / sqrt(r)`.
        dora: learn the lengths of rows apart.
        targets: patterns of layers; empty: all linear ones.
        whole: layers that are trained whole beside it.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    targets: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the curve of a run, with the bundle and the data.

    Attributes:
        loss: what is minimised.
        lora: the adapter; None: the bundle's own weights are trained.
        freeze: patterns of parameters that stay as they are.
        epochs: how often each example is seen.
        batch_size: examples of a step.
        lr: greatest learning rate.
        schedule: how the rate falls after the warm-up.
        warmup: part of the steps in which the rate rises, from 0 to 1.
        weight_decay: of AdamW.
        clip: greatest norm of the gradient; 0: any.
        validation: part of the examples that is held out and never trained on, from 0 to below 1.
        seed: of the order of the examples, of dropout and of an adapter's first values.
        columns: the data's column of each input of the bundle, where they differ in name.
        target: the column of classes.
        result: the output of the bundle that the loss reads.
        length: most tokens of a text.
    """

    loss: Loss
    lora: Lora | None = None
    freeze: tuple[str, ...] = ()
    epochs: int = 3
    batch_size: int = 32
    lr: float = 1e-4
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    validation: float = 0.1
    seed: int = 0
    columns: tuple[tuple[str, str], ...] = ()
    target: str | None = None
    result: str | None = None
    length: int = 128

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate after `step` of `steps` steps."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        part = (step - rising) / max(steps - rising, 1)
        falls = {"cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part, "constant": 1.0}
        return self.lr * falls[self.schedule]

    def record(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
