"""`stepper()` of a bundle loaded for inference by ONNX Runtime: whole training steps without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.plan import Plan
from aotexport_runtime.module.optimizer import MAX_NORM, SCALE, SEED, Optimizer, state_of
from aotexport_runtime.schema.manifest import STEP


class OnnxStepper:
    """Makes whole training steps in one ONNX model: forward, loss, backward, clipping, the optimizer.

    Weights and the optimizer's state are in `state` of the module, whose other programs read the weights there; steps
    write over these arrays where they can.

    Attributes:
        lr: learning rate of the next steps, one for every group of the optimizer or one each.
        max_norm: norm that gradients are clipped to, if the program clips; infinite: they are not.
        seed: what dropout draws by, with the number of steps.
    """

    def __init__(
        self,
        bundle: Bundle,
        optimizer: Optimizer,
        plan: Plan,
        state: dict[str, Any],
        *,
        lr: float | Sequence[float] | None,
        max_norm: float | None,
        seed: int,
    ) -> None:
        """Begin with step 0, or go on from `state`, which `plan` of the step changes; see `OnnxModule.stepper`."""
        self._bundle, self._optimizer, self._plan, self._state = bundle, optimizer, plan, state
        self._held = state_of(optimizer, bundle.manifest, bundle.program(STEP))
        rates, self.max_norm = optimizer.rates(lr, max_norm)
        self.lr: float | Sequence[float] = rates
        self.seed = seed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step on a batch; return the loss before it.

        Args:
            *args: arguments of the module's `forward`, arrays of numpy.
            **kwargs: its keyword arguments.

        Raises:
            ArgumentInvalid: `lr` has another number of rates than there are groups.
            CallInvalid: the call does not fit the program.
            NotSupported: `max_norm` is finite, and the program does not clip.
        """
        lr, max_norm = self._optimizer.rates(self.lr, self.max_norm)
        rates = {f"optimizer['lr'][{index}]": rate for index, rate in enumerate(lr)}
        given, state = {**rates, MAX_NORM: max_norm, SEED: self.seed, SCALE: 1.0}, self._state
        for path, held in self._held.items():
            if path in given or path not in state:
                state[path] = np.full(held.shape, given.get(path, held.initial), held.dtype)
        return self._plan.call(args, kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and buffers that steps have changed, borrowed, by all names that the module has."""
        return {
            name: self._state[entry.name]
            for entry in self._bundle.manifest.state
            if entry.name in self._state and entry.role != "constant"
            for name in (entry.name, *entry.tied)
        }
