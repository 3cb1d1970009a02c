"""`module.stepper()`: whole training steps by the program `step`, as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotexport_runtime.call.plan import Plan
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.guards.caller import has_hooks
from aotexport_runtime.module.compose import compose
from aotexport_runtime.module.optimizer import COUNT, FORMS, GRADS, MAX_NORM, SCALE, holding, optimizer_of, state_of
from aotexport_runtime.module.state import BundleState
from aotexport_runtime.schema.manifest import STEP
from aotexport_runtime.submodules.adapter import adapters_below
from aotexport_runtime.submodules.tables import HOOKS, are_all_hooked
from aotexport_runtime.values import dtypes

_COUNT = "step"
"""Name of the number of steps in the state of torch's optimizers, which have it per parameter."""


class Stepper(torch.optim.Optimizer):
    """Makes whole training steps of a loaded module in one program: forward, loss, backward, clipping, the optimizer.

    It is an optimizer of torch: schedulers set `lr` of its groups, and `state_dict` is that of the optimizer that the
    bundle was exported with, into which it loads and from which it takes one. Parameters are the module's own, changed
    in place.

    Attributes:
        max_norm: norm that gradients are clipped to, if the program clips; infinite: they are not.
        scale: what the loss is multiplied by before its gradients are added to those that parameters have in `grad`,
            if the program adds them; they are zeros after a step.
    """

    scale = 1.0

    def __init__(self, module: BundleState, *, lr: float | Sequence[float] | None, max_norm: float | None) -> None:
        """Begin with step 0; see `BundleModule.stepper`."""
        self._optimizer = optimizer_of(module.bundle.manifest)
        if STEP not in module.bundle.program_names:
            raise NotSupported(f"the bundle has no program `{STEP}` here; loads in another dtype have none")
        tensors = dict(module.named_parameters())
        groups = [
            {**group.options, "params": [tensors[name] for name in group.parameters]}
            for group in self._optimizer.groups
        ]
        rates, self.max_norm = self._optimizer.rates(lr, max_norm)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self._module, self._program = module, module.bundle.program(STEP)
        super().__init__(groups, dict(self._optimizer.groups[0].options))
        options = [each.options for each in self._optimizer.groups]
        self._fixed = [{n: v for n, v in each.items() if n not in ("lr", *FORMS)} for each in options]
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        self._trains = [(name, *module._slot(name), id(each) in own) for name, each in module.named_parameters()]
        self._grads = list[tuple[torch.nn.Parameter, torch.Tensor]]()
        self._table = self._made()
        self._plan: Plan | None = None
        self._changes: Any = None
        self._rates = [float("nan")] * len(groups)

    def _made(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the program's argument `optimizer`, by their path there."""
        parameters = {
            name: parameter
            for record, group in zip(self._optimizer.groups, self.param_groups, strict=True)
            for name, parameter in zip(record.parameters, group["params"], strict=True)
        }
        device, table = next(iter(parameters.values())).device, dict[str, torch.Tensor]()
        for path, held in state_of(self._optimizer, self._module.bundle.manifest, self._program).items():
            if not held.parameter:
                table[path] = torch.zeros((), dtype=dtypes.dtype(held.dtype), device=device)
                continue
            parameter, dtype = parameters[held.parameter], dtypes.dtype(held.dtype)
            table[path] = value = (
                torch.full_like(parameter, held.initial, dtype=dtype, requires_grad=False)
                if held.shape == parameter.shape
                else torch.full(held.shape, held.initial, dtype=dtype, device=device)
            )
            if held.name == GRADS:
                self._grads.append((parameter, value))
            else:
                self.state[parameter][held.name] = value
        return table

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step on a batch; return the loss before it, or the loss and results by name, without a graph.

        Args:
            *args: arguments of the module's `forward`.
            **kwargs: its keyword arguments.

        Raises:
            CallInvalid: the call does not fit the program.
            NotSupported: the module or the optimizer was changed in a way that the program does not follow.
        """
        return self.step(lambda: self._run(args, kwargs))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Refuse: a call of the stepper makes the whole step (`NotSupported`)."""
        # Of a class, it is wrapped by torch: hooks run, and schedulers notice steps.
        if closure is None:
            raise NotSupported("a stepper makes the whole step when it is called: `loss = stepper(batch)`")
        return closure()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._plan is None or self._module.changes() is not self._changes:
            self._plan = self._composed()
            self._changes = self._module.changes()
        self._check()
        for index, group in enumerate(self.param_groups):
            if (rate := group["lr"]) != self._rates[index]:
                self._table[f"optimizer['lr'][{index}]"].fill_(rate)
                self._rates[index] = float(rate)
        _, max_norm = self._optimizer.rates(None, self.max_norm)
        if self._optimizer.clip:
            self._table[MAX_NORM].fill_(max_norm)
        if self._optimizer.accumulate:
            self._take_gradients()
        elif self.scale != 1.0:
            raise NotSupported("the program adds no gradients up: export the step with `accumulate=True`")
        with torch.no_grad():
            return self._plan.call(args, self._module.python_state.passed_with(kwargs))

    def _take_gradients(self) -> None:
        self._table[SCALE].fill_(self.scale)
        for parameter, held in self._grads:
            if parameter.grad is not held:
                held.zero_() if parameter.grad is None else held.copy_(parameter.grad)
                parameter.grad = held

    def _composed(self) -> Plan:
        """Return the program as one that reads the optimizer's state by itself, as it reads the module's."""
        if (why_not := self._why_not_followed()) is not None:
            raise NotSupported(
                f"{why_not}, and the program `{STEP}` has its own. Derive a bundle of the module with it"
            )
        return compose(self._module, holding(self._program), added={name: (self._table, name) for name in self._table})

    def _why_not_followed(self) -> str | None:
        """Return what calls of the module do and the program does not; None: nothing."""
        for change in self._module.changes():
            return f"`{change.path}` {change.how}"
        if next((path for path, each in adapters_below(self._module) if each.is_needed()), None) is not None:
            return "the module has an adapter"
        return None

    def _check(self) -> None:
        module = self._module
        if not module.training:
            raise NotSupported("a step is made in train mode, and the module is in eval mode: call `.train()` first")
        if are_all_hooked():
            raise NotSupported(
                "hooks of all modules are set, and a step calls none: remove them, or train without steps"
            )
        for group, fixed in zip(self.param_groups, self._fixed, strict=True):
            # Betas may be a tuple.
            now = {name: [*group[name]] if isinstance(fixed[name], list) else group[name] for name in fixed}
            if now != fixed:
                names = " and ".join(f"`{name}`" for name in now if now[name] != fixed[name])
                raise NotSupported(
                    f"{names} of the optimizer is fixed in the program, which takes other learning rates alone"
                )
        if any(module.__dict__[table] for table in HOOKS):
            raise NotSupported("the module has hooks, which a step does not call")
        for name, table, key, trains in self._trains:
            if has_hooks(table[key]):
                raise NotSupported(f"`{name}` has hooks, and a step hands no gradients out")
            if table[key].requires_grad != trains:
                raise NotSupported(
                    f"`{name}` was frozen or thawed, and the program updates the parameters that it was exported with. "
                    "Derive a bundle (`--freeze`, `--step`)"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the layout of the optimizer that the bundle was exported with."""
        for own in self.state.values():
            own[_COUNT] = self._table[COUNT].to(torch.float32)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of a stepper, or of an optimizer of torch of the same class and groups.

        Raises:
            NotSupported: parameters have made different numbers of steps.
            ValueError: it is of other groups, or of other parameters.
        """
        counts = {float(own[_COUNT]) for own in state_dict["state"].values() if _COUNT in own}
        if len(counts) > 1:
            raise NotSupported("the parameters of this state have made different numbers of steps, and a program one")
        tensors = {parameter: dict(own) for parameter, own in self.state.items()}
        initial = {name: value for group in self._optimizer.groups for name, value in group.state.items()}
        super().load_state_dict(state_dict)
        for parameter, own in tensors.items():
            loaded = self.state[parameter]
            for name, tensor in own.items():
                if name == _COUNT:
                    continue
                value = loaded.get(name, torch.full_like(tensor, initial[name]))
                if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
                    raise ValueError(f"the state of a parameter has a `{name}` of another shape")
                loaded[name] = tensor.copy_(value)
        self._table[COUNT].fill_(next(iter(counts), 0.0))
