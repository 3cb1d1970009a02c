"""`module.stepper()`: whole training steps by the program `step`, as an optimizer of torch."""

# A loaded module has its tables in attributes without public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
import torch

from aotexport_runtime.call.plan import Plan
from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.guards.caller import has_hooks
from aotexport_runtime.module.compose import compose
from aotexport_runtime.schema.manifest import OPTIMIZER, STEP, Manifest
from aotexport_runtime.schema.program import ArgumentInput, InputSpec, StateInput
from aotexport_runtime.submodules.adapter import adapters_below
from aotexport_runtime.submodules.tables import HOOKS
from aotexport_runtime.values import dtypes

if TYPE_CHECKING:
    from aotexport_runtime.module.bundle_module import BundleModule

_COUNT = "step"
"""Name of the number of steps in the state of torch's optimizers, which have it per parameter."""

FORMS = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that choose among forms of one computation, and may be any."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of the optimizer: names of its parameters, options as torch has them, and the state of each parameter."""

    parameters: list[str]
    options: dict[str, bool | int | float | list[float] | None]
    state: list[str]
    initial: float


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The extension of a manifest with a program `step`: its optimizer.

    Attributes:
        optimizer: name of its class in `torch.optim`.
        clip: whether it clips gradients by their norm.
        updates: the parameters that it updates, in the order of their state.
        groups: its groups, also of parameters that take no gradient.
    """

    optimizer: str
    clip: bool
    updates: list[str]
    groups: list[Group]


class Stepper(torch.optim.Optimizer):
    """Makes whole training steps of a loaded module in one program: forward, loss, backward, clipping, the optimizer.

    It is an optimizer of torch: schedulers set `lr` of its groups, and `state_dict` is that of the optimizer that the
    bundle was exported with, into which it loads and from which it takes one. Parameters are the module's own, changed
    in place.

    Attributes:
        max_norm: norm that gradients are clipped to, if the program clips; infinite: they are not.
    """

    def __init__(self, module: BundleModule, *, lr: float | Sequence[float] | None, max_norm: float | None) -> None:
        """Begin with step 0; see `BundleModule.stepper`."""
        self._optimizer = optimizer_of(module.bundle.manifest)
        if STEP not in module.bundle.program_names:
            raise NotSupported(f"the bundle has no program `{STEP}` here; loads in another dtype have none")
        tensors = dict(module.named_parameters(remove_duplicate=False))
        if unknown := [name for group in self._optimizer.groups for name in group.parameters if name not in tensors]:
            raise NotSupported(f"the bundle's extension `{OPTIMIZER}` names `{unknown[0]}`, which is no parameter")
        groups = [
            {**group.options, "params": [tensors[name] for name in group.parameters]}
            for group in self._optimizer.groups
        ]
        rates = [lr] * len(groups) if lr is None or isinstance(lr, int | float) else list(lr)
        if len(rates) != len(groups):
            raise ArgumentInvalid(f"`lr`: the optimizer has {len(groups)} groups of parameters, got {len(rates)} rates")
        if max_norm is not None and not self._optimizer.clip:
            raise NotSupported("the program does not clip gradients: export the step with `clip=True`")
        for group, rate in zip(groups, rates, strict=True):
            group |= {} if rate is None else {"lr": rate}
        self._module, self._program = module, module.bundle.program(STEP)
        self.max_norm = float("inf") if max_norm is None else max_norm
        super().__init__(groups, dict(self._optimizer.groups[0].options))
        options = [each.options for each in self._optimizer.groups]
        self._fixed = [{n: v for n, v in each.items() if n not in ("lr", *FORMS)} for each in options]
        self._trains = [(name, *module._slot(name), each.requires_grad) for name, each in module.named_parameters()]
        self._table = self._made()
        self._plan: Plan | None = None
        self._changes: Any = None
        self._rates = [float("nan")] * len(groups)

    def _made(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the program's argument `optimizer`, by their path there."""
        parameters = {
            name: (parameter, record)
            for record, group in zip(self._optimizer.groups, self.param_groups, strict=True)
            for name, parameter in zip(record.parameters, group["params"], strict=True)
        }
        device = next(iter(parameters.values()))[0].device
        table = {"optimizer['count']": torch.zeros((), dtype=torch.float64, device=device)}
        for index in range(len(self.param_groups)):
            table[f"optimizer['lr'][{index}]"] = torch.zeros_like(table["optimizer['count']"])
        for index, (parameter, record) in enumerate(map(parameters.__getitem__, self._optimizer.updates)):
            for name in record.state:
                value = torch.full_like(parameter, record.initial, requires_grad=False)
                table[f"optimizer['state'][{index}]['{name}']"] = self.state[parameter][name] = value
        if self._optimizer.clip:
            table["optimizer['max_norm']"] = torch.zeros_like(table["optimizer['count']"])
        taken = {spec.path: spec.meta for spec in self._program.inputs if _is_of_optimizer(spec)}
        kinds = {path: (dtypes.name_of(value.dtype), tuple(value.shape)) for path, value in table.items()}
        if kinds != {path: (meta.dtype, meta.shape) for path, meta in taken.items()}:
            raise NotSupported(f"the bundle's extension `{OPTIMIZER}` does not fit the state that its program takes")
        return table

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Make one step on a batch; return the loss before it, without a graph.

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

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._check()
        for index, group in enumerate(self.param_groups):
            if (rate := group["lr"]) != self._rates[index]:
                self._table[f"optimizer['lr'][{index}]"].fill_(rate)
                self._rates[index] = float(rate)
        if self._optimizer.clip:
            self._table["optimizer['max_norm']"].fill_(self.max_norm)
        if self._plan is None or self._module.changes() is not self._changes:
            self._plan = self._composed()
            self._changes = self._module.changes()
        with torch.no_grad():
            return self._plan.call(args, self._module.python_state.passed_with(kwargs))

    def _composed(self) -> Plan:
        """Return the program as one that reads the optimizer's state by itself, as it reads the module's."""
        if (why_not := self._why_not_followed()) is not None:
            raise NotSupported(
                f"{why_not}, and the program `{STEP}` has its own. Derive a bundle of the module with it"
            )
        inputs = [
            StateInput(name=spec.path, meta=spec.meta) if _is_of_optimizer(spec) else spec
            for spec in self._program.inputs
        ]
        own = tuple(parameter for parameter in self._program.parameters if parameter.name != "optimizer")
        program = msgspec.structs.replace(self._program, inputs=tuple(inputs), parameters=own)
        return compose(self._module, program, added={name: (self._table, name) for name in self._table})

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
            own[_COUNT] = self._table["optimizer['count']"].to(torch.float32)
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
        super().load_state_dict(state_dict)
        initial = self._optimizer.groups[0].initial
        for parameter, own in tensors.items():
            loaded = self.state[parameter]
            for name, tensor in own.items():
                if name == _COUNT:
                    continue
                value = loaded.get(name, torch.full_like(tensor, initial))
                if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
                    raise ValueError(f"the state of a parameter has a `{name}` of another shape")
                loaded[name] = tensor.copy_(value)
        self._table["optimizer['count']"].fill_(next(iter(counts), 0.0))


def _is_of_optimizer(spec: InputSpec) -> TypeGuard[ArgumentInput]:
    return isinstance(spec, ArgumentInput) and spec.path.startswith("optimizer[")


def optimizer_of(manifest: Manifest) -> Optimizer:
    """Return the optimizer of a bundle.

    Raises:
        NotSupported: the bundle has no whole training step, or its extension is malformed.
    """
    if OPTIMIZER not in manifest.extensions:
        raise NotSupported(
            "the bundle has no whole training step: add it with `aotexport derive BUNDLE -o OUT --step adamw`"
        )
    try:
        found = msgspec.convert(manifest.extensions[OPTIMIZER], Optimizer)
        names = [name for group in found.groups for name in group.parameters]
        if not all(isinstance(group.options.get("lr"), int | float) for group in found.groups):
            raise ValueError("a group has no `lr`")
        if len(set(names)) < len(names) or not {*found.updates} <= {*names} or not found.updates:
            raise ValueError("its groups do not have the parameters that it updates")
    except (msgspec.ValidationError, ValueError) as error:
        raise NotSupported(f"the bundle's extension `{OPTIMIZER}` is malformed: {error}") from None
    return found
