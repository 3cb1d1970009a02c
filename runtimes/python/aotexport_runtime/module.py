"""A loaded bundle as an `nn.Module` with the original names."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import nn

from aotexport_runtime import dtypes
from aotexport_runtime.autocast import device_type_of
from aotexport_runtime.bundle import Bundle
from aotexport_runtime.call.engines import Engines
from aotexport_runtime.call.plan import Plan, StateSlot
from aotexport_runtime.call.straight_line import Call
from aotexport_runtime.call.variants import Variants
from aotexport_runtime.engines.choice import libraries_of
from aotexport_runtime.engines.codegen import Environment
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.explain import Explanation, ProgramExplanation, explained
from aotexport_runtime.module_class import class_of, methods_of
from aotexport_runtime.python_state import Kept, PythonState, WithAttributes
from aotexport_runtime.schema.manifest import Manifest, StateTensor
from aotexport_runtime.schema.subclasses import Subclass
from aotexport_runtime.subclasses import Form


class BundleModule(WithAttributes):
    """A bundle, loaded: called, trained and saved like the module that it was exported from.

    Parameters and buffers have their original names, tied ones are tied. `train()` and `eval()` choose the program.
    Methods that the bundle has programs of are methods of the module.

    Attributes:
        bundle: the open bundle.
    """

    def __new__(cls, bundle: Bundle, *args: Any, environment: Environment, **kwargs: Any) -> Self:
        """Make an object of a class of its own, which shows the signatures of the bundle's programs."""
        own: type[Any] = class_of(cls, bundle, environment, cls._call) if cls is BundleModule else cls
        return super().__new__(own)

    def __init__(
        self,
        bundle: Bundle,
        tensors: dict[str, torch.Tensor],
        *,
        target: str,
        environment: Environment,
        compiled: str | None = None,
        why_not: Mapping[str, str] | None = None,
    ) -> None:
        """Build the module; use `aotexport_runtime.load`.

        Args:
            bundle: an open bundle.
            tensors: its state, by name; owned by the module from now on.
            target: engine to run, see `load`.
            environment: namespaces and device.
            compiled: compiled target to run where it has a program, whose native files the caller trusts; None: none.
            why_not: why other engines do not run, by name; None: they do.
        """
        super().__init__()
        self.bundle = bundle
        self._environment = environment
        self._target = target
        self._compiled = compiled
        self._why_not = dict(why_not or {})
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._plans: dict[str, Plan | Variants] = {}
        self._served: dict[tuple[bool, bool], Call] = {}
        self._methods = methods_of(bundle)
        # Last, since a name of the user's may equal one of ours, and can then no longer be assigned to.
        for entry in bundle.manifest.state:
            self._register(entry, tensors[entry.name])
        # Past `__setattr__`, which keeps names of the user's.
        self.__dict__["_python_state"] = PythonState(bundle.manifest.attributes, [*self.state_tensors().values()])
        for attribute in bundle.manifest.attributes:
            path = attribute.name.rpartition(".")[0]
            owner = self._container(path.split(".")) if path else self
            owner.keep(Kept(self.python_state, path))
        self.train(bundle.manifest.training)

    @property
    def device(self) -> torch.device | None:
        """Where the bundle was loaded to; None: where it was captured."""
        return self._environment.device

    @property
    def python_state(self) -> PythonState:
        """What calls change in attributes of the module."""
        return self.__dict__["_python_state"]

    def form(self, record: Subclass) -> Form:
        """Return the structure of a tensor subclass with its class, which the caller of `load` gave."""
        return self._environment.form(record)

    # --- state --------------------------------------------------------------------------------------------

    def _register(self, entry: StateTensor, tensor: torch.Tensor) -> None:
        if entry.role == "constant":
            self._constants[entry.name] = tensor.requires_grad_(entry.requires_grad)
            return
        value = nn.Parameter(tensor, requires_grad=entry.requires_grad) if entry.role == "parameter" else tensor
        if entry.role == "buffer" and entry.requires_grad:
            tensor.requires_grad_(True)
        for name in (entry.name, *entry.tied):
            *path, leaf = name.split(".")
            owner = self._container(path)
            # Straight into the tables: a name of the user's may equal one of ours.
            if isinstance(value, nn.Parameter):
                owner._parameters[leaf] = value
            else:
                owner._buffers[leaf] = value
                if not entry.persistent:
                    owner._non_persistent_buffers_set.add(leaf)
            self._owners[name] = (owner, leaf)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load state in which tied tensors may have one of their names alone, as files of safetensors have them."""
        for entry in self.bundle.manifest.state:
            names = [prefix + name for name in (entry.name, *entry.tied)]
            known = next((state_dict[name] for name in names if name in state_dict), None)
            for name in names if known is not None else ():
                state_dict.setdefault(name, known)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _container(self, path: list[str]) -> WithAttributes:
        module: WithAttributes = self
        for part in path:
            if part not in module._modules:
                module._modules[part] = Container()
            child = module._modules[part]
            assert isinstance(child, Container)
            module = child
        return module

    def _slot(self, name: str) -> StateSlot:
        """Return where the current tensor of state `name` is kept (it may be replaced between calls)."""
        if name in self._constants:
            return self._constants, name
        owner, leaf = self._owners[name]
        return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> BundleModule:
        for dtype in {tensor.dtype for tensor in self.state_tensors().values()}:
            converted = fn(torch.empty(0, dtype=dtype)).dtype
            if converted != dtype:
                raise NotSupported(
                    f"the programs were captured with weights of {dtypes.name_of(dtype)}, and do not hold for "
                    f"{dtypes.name_of(converted)}. Convert the model and its example inputs, and export again"
                )
        before = self.state_tensors()
        super()._apply(fn, recurse)
        for name, tensor in self._constants.items():
            self._constants[name] = fn(tensor)
        moved = {id(before[name]): tensor for name, tensor in self.state_tensors().items()}
        self.python_state.values = self.python_state.replaced(lambda tensor: moved.get(id(tensor), fn(tensor)))
        tensors = (*self.parameters(), *self.buffers(), *self._constants.values())
        devices = {tensor.device for tensor in tensors}
        if len(devices) == 1:
            self.__dict__["_environment"] = dataclasses.replace(self._environment, device=devices.pop())
            self._plans.clear()
            self._served.clear()
        return self

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the current tensor of every entry of the manifest's state, by its first name; not copied."""
        slots = {entry.name: self._slot(entry.name) for entry in self.bundle.manifest.state}
        return {name: table[key] for name, (table, key) in slots.items()}

    def check_ties(self) -> None:
        """Refuse a module whose tied tensors no longer are: its programs, and a bundle, have one tensor for them.

        Raises:
            NotSupported: names them.
        """
        for entry in self.bundle.manifest.state:
            if entry.role == "constant":
                continue
            table, key = self._slot(entry.name)
            tied = [self._slot(name) for name in entry.tied]
            if any(other.get(name) is not table[key] for other, name in tied):
                names = ", ".join(f"`{name}`" for name in (entry.name, *entry.tied))
                raise NotSupported(f"{names} are one tensor in the programs, and no longer are in the module")

    def train(self, mode: bool = True) -> BundleModule:
        """Choose the programs of train mode, or those of evaluation mode."""
        for module in self.modules():
            # Past `Container`, which keeps to the mode of the whole.
            module.__dict__["training"] = mode
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `training` as `train()` does, since a bundle has one mode."""
        if name == "training":
            self.train(value)
        else:
            super().__setattr__(name, value)

    # --- calls --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program of the current mode.

        Raises:
            CallInvalid: the call does not fit the program.
            NotSupported: the bundle has no program for this mode.
        """
        served = self._served.get((self.training, torch.is_grad_enabled()))
        if served is None:
            plan = self._plan(self._select("forward"))
            served = plan.call if isinstance(plan, Plan) else plan
            self._served[self.training, torch.is_grad_enabled()] = served
        return served(args, self.python_state.passed_with(kwargs))

    def program(self, name: str) -> Callable[..., Any]:
        """Return program `name` as a function of its inputs, whatever the mode of the module.

        Raises:
            BundleInvalid: no such program.
        """
        plan = self._plan(name)
        return lambda *args, **kwargs: plan(args, self.python_state.passed_with(kwargs))

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._plan(self._select(method))(args, self.python_state.passed_with(kwargs))

    def _select(self, method: str) -> str:
        programs = self._methods.get(method, [])
        if not programs:
            raise NotSupported(
                f"the bundle has no program of `{method}`, only of {', '.join(f'`{name}`' for name in self._methods)}"
            )
        mode = "train" if self.training else "eval"
        fitting = [program for program in programs if program.mode in (mode, "function")]
        if not fitting:
            names = ", ".join(f"`{program.name}` ({program.mode} mode)" for program in programs)
            raise NotSupported(
                f"the module is in {mode} mode, and the bundle has only {names}. Call "
                f"`.{'eval' if self.training else 'train'}()` first, or export a program for {mode} mode"
            )
        grad = torch.is_grad_enabled()
        return next((program.name for program in fitting if program.grad == grad), fitting[0].name)

    def _plan(self, name: str) -> Plan | Variants:
        plan = self._plans.get(name)
        if plan is None:
            variants = [entry.name for entry in self.bundle.manifest.programs if entry.variant_of == name]
            plan = (
                Variants([*map(self.bundle.program, [name, *variants])], self._compose)
                if variants
                else self._compose(name)
            )
            self._plans[name] = plan
        return plan

    def _compose(self, name: str) -> Plan:
        program = self.bundle.program(name)
        device = self._environment.device or device_type_of(program, None)
        engines = Engines(name, str(device), self._why_not)
        return Plan(
            self.bundle,
            program,
            self._slot,
            self._environment,
            target=self._target,
            engines=engines,
            libraries=libraries_of(self.bundle, self._compiled, program, self._environment, engines.why_not),
        )

    def explain(self) -> Explanation:
        """Return which engines run each program, on which device, why the others do not, and what has run so far.

        `print(module.explain())` shows it. Programs that no call has reached are prepared for it, as a call would do.
        """
        return Explanation(self._target, tuple(map(self.explain_program, self.bundle.program_names)))

    def explain_program(self, name: str) -> ProgramExplanation:
        """Return what `explain` says of program `name`."""
        entry = next(entry for entry in self.bundle.manifest.programs if entry.name == name)
        try:
            plan = self._plan(entry.variant_of or name)
            return explained(plan.engines if isinstance(plan, Plan) else plan.plan(name).engines)
        except NotSupported as error:
            return ProgramExplanation(name, refused=str(error))

    # --- copies -------------------------------------------------------------------------------------------

    def twin(self, *, target: str | None = None, memo: dict[int, Any] | None = None) -> BundleModule:
        """Return an independent copy.

        Args:
            target: engine of the copy; None: the same.
            memo: of `copy.deepcopy`.

        Raises:
            NotSupported: tensors that are tied in the programs no longer are in the module.
        """
        memo = {} if memo is None else memo
        self.check_ties()
        tensors = {name: copy.deepcopy(tensor, memo) for name, tensor in self.state_tensors().items()}
        twin = type(self)(
            self.bundle,
            tensors,
            target=target or self._target,
            environment=self._environment,
            compiled=self._compiled if target is None else None,
            why_not=self._why_not if target is None else None,
        )
        twin.python_state.values = self.python_state.copied(memo)
        requires_grad = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(requires_grad.get(name, parameter.requires_grad))
        return twin.train(self.training)

    def over(self, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> BundleModule:
        """Return a module of the same programs over other state.

        Args:
            manifest: that of the bundle, with other state and attributes.
            tensors: its state, by name, detached; shared.
        """
        bundle = Bundle(self.bundle.root, manifest)
        other = BundleModule(bundle, tensors, target=self._target, environment=self._environment)
        return other.train(self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> BundleModule:
        twin = memo[id(self)] = self.twin(memo=memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupported(
            "a loaded bundle is not pickled: save it with `aotexport_runtime.save(module, path)`, "
            "or its weights alone with `module.state_dict()`"
        )

    def _get_name(self) -> str:
        return BundleModule.__name__

    def extra_repr(self) -> str:
        """Return what `repr` shows: name and programs."""
        programs = ", ".join(self.bundle.program_names)
        return f"{self.bundle.manifest.name}, programs: {programs}, from {str(self.bundle.root)!r}"


class Container(WithAttributes):
    """Stands where the original had a submodule, so that names are the same; it has no behaviour of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a bundle holds the behaviour of the whole module only.

        Raises:
            NotSupported: always.
        """
        raise NotSupported("a bundle holds the program of the whole module; its submodules cannot be called")

    def train(self, mode: bool = True) -> Container:
        """Refuse another mode than the whole module's.

        Raises:
            NotSupported: the mode differs.
        """
        if mode != self.training:
            raise NotSupported(
                "a bundle holds the modes of the whole module, and a submodule cannot be switched alone. Switch it "
                "before the export, which keeps such a mixture, or export the program `eval-joint`"
            )
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a parameter, a buffer, or an attribute that calls change; refuse what no call would look at.

        Raises:
            NotSupported: the attribute is another, or the mode is not the whole module's.
        """
        if name == "training" and "training" in self.__dict__:
            self.train(value)
        elif name.startswith("_") or name == "training" or self._is_looked_at(name, value):
            super().__setattr__(name, value)
        else:
            raise NotSupported(
                f"a bundle holds the program of the whole module, and no call looks at the attribute `{name}` of a "
                "submodule. Set it before the export"
            )

    def _is_looked_at(self, name: str, value: Any) -> bool:
        kept: Kept | None = self.__dict__.get("_kept")
        known = name in self._parameters or name in self._buffers or (kept is not None and name in kept)
        return known or isinstance(value, nn.Module | torch.Tensor)

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the submodule is never called, and its hooks would not run.

        Raises:
            NotSupported: always.
        """
        raise NotSupported(
            "a bundle holds the program of the whole module, so hooks on its submodules would never run. Register them "
            "on the loaded module, on its parameters or on its outputs"
        )

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook


__all__ = ["BundleModule", "Container"]
