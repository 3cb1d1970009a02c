"""A loaded bundle as an `nn.Module` with the original names."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import nn

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.plan import Call, Plan, called
from aotexport_runtime.engines.candidates import Request
from aotexport_runtime.engines.runs import Engines, Explanation
from aotexport_runtime.engines.select import NO_TARGETS, Choice
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.execution.codegen import Environment, constant_value
from aotexport_runtime.module.compose import add_taps, compose, program_of, tapped
from aotexport_runtime.module.module_class import class_of, methods_of
from aotexport_runtime.schema.graph import Subclass
from aotexport_runtime.schema.manifest import TRANSFORMERS, Manifest
from aotexport_runtime.submodules.changes import SubmoduleChange, changes_of, check_peft_targets
from aotexport_runtime.submodules.python_state import PythonState
from aotexport_runtime.submodules.submodule import Loaded, at, build, copied, switch
from aotexport_runtime.submodules.tables import Origin, StateSlot, seal, slot_of
from aotexport_runtime.values import dtypes
from aotexport_runtime.values.subclasses import Form

if TYPE_CHECKING:
    from aotexport_runtime.engines.frozen import Weights
    from aotexport_runtime.module.stepper import Stepper


class BundleModule(Loaded):
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
        environment: Environment,
        request: Request,
        targets: Choice = NO_TARGETS,
        taps: Sequence[str] = (),
    ) -> None:
        """Build the module over `tensors` by name, which it owns from now on; use `aotexport_runtime.load`.

        `targets` is the native code that may run, whose files the caller trusts; `taps`: see `load`.
        """
        super().__init__()
        self.bundle = bundle
        self._environment = environment
        self._request = request
        self._targets = targets
        self._constants: dict[str, torch.Tensor] = {}
        self._calls: dict[str, Call] = {}
        self._plans: dict[str, Plan] = {}
        self._served: dict[tuple[bool, bool], Call] = {}
        self._methods = methods_of(bundle)
        self._fixed = frozenset(bundle.manifest.settings)
        if TRANSFORMERS in bundle.manifest.extensions:
            from aotexport_runtime.generation.language_model import described

            self.__dict__ |= (libraries := described(bundle.manifest))
            self._fixed -= libraries.keys()
        self._changes: list[SubmoduleChange] | None = None
        self._untold: set[str] | None = None
        self._taps = tuple(taps)
        self._loaded: Weights = {}
        # Last: a name of the user's may equal one of ours, which can then no longer be assigned to.
        self._constants.update(
            build(self, bundle.manifest, tensors, lambda leaf: constant_value(leaf.value, environment))
        )
        # Bypasses `__setattr__`, which handles the user's names.
        self.__dict__["_python_state"] = PythonState(bundle.manifest.attributes, [*self.state_tensors().values()])
        self._keep_attributes()
        self.__dict__["_origin"] = Origin(self, "")
        for module in self.modules():
            seal(module)
        self.train(bundle.manifest.training)
        add_taps(self, bundle, taps)
        if request.frozen:
            # Tensors of inference mode have no versions.
            own = {name: tensor for name, tensor in self.state_tensors().items() if not tensor.is_inference()}
            self.__dict__["_loaded"] = {name: (tensor, tensor._version) for name, tensor in own.items()}

    def _keep_attributes(self) -> None:
        """Let the module and its submodules read attributes that calls change from the Python state."""
        for attribute in self.bundle.manifest.attributes:
            path = attribute.name.rpartition(".")[0]
            at(self, path).keep(self.python_state, path)

    @property
    def device(self) -> torch.device | None:
        """Where the bundle was loaded to; None: where it was captured."""
        return self._environment.device

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The current tensors that calls use and that are no parameters or buffers, by name; not copied."""
        return self.__dict__["_constants"]

    @property
    def python_state(self) -> PythonState:
        """Attributes of the module that calls change."""
        return self.__dict__["_python_state"]

    def form(self, record: Subclass) -> Form:
        """Return the structure of a tensor subclass with its class, which the caller of `load` gave."""
        return self._environment.form(record)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load state in which tied tensors may have only one of their names, as in safetensors files."""
        for entry in (entry for entry in self.bundle.manifest.state if entry.tied):
            slots = {name: slot for name in (entry.name, *entry.tied) if (slot := self._find(name)) is not None}
            current = {name: table.get(key) for name, (table, key) in slots.items()}
            names = [prefix + name for name, tensor in current.items() if tensor is current.get(entry.name)]
            known = next((state_dict[name] for name in names if name in state_dict), None)
            for name in names if known is not None else ():
                state_dict.setdefault(name, known)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def changed(self) -> None:
        """Compose the programs anew at their next call, with the submodules of that time."""
        # Bypasses `__setattr__`, which handles the user's names.
        self.__dict__["_changes"] = None
        for made in ("_calls", "_plans", "_served"):
            self.__dict__[made].clear()

    def changes(self) -> list[SubmoduleChange]:
        """Return the changes of submodules since the load.

        Raises:
            NotSupported: one was changed in a way that no call can follow.
        """
        found: list[SubmoduleChange] | None = self.__dict__["_changes"]
        if found is None:
            found = self.__dict__["_changes"] = changes_of(self, self.bundle.manifest)
        return found

    def _find(self, name: str) -> StateSlot | None:
        """Return the slot of a state tensor's current value, which may be replaced between calls; None: it is gone."""
        return (self._constants, name) if name in self._constants else slot_of(self, name)

    def _slot(self, name: str) -> StateSlot:
        slot = self._find(name)
        if slot is None:
            raise NotSupported(
                f"the module's `{name}` is gone, and the programs read it. Put a tensor of its dtype and shape in its "
                "place, or change the model and export it again"
            )
        return slot

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> BundleModule:
        for dtype in {tensor.dtype for tensor in self.present_tensors().values()}:
            converted = fn(torch.empty(0, dtype=dtype)).dtype
            if converted != dtype:
                raise NotSupported(
                    f"the programs were captured with weights of {dtypes.name_of(dtype)}, and do not hold for "
                    f"{dtypes.name_of(converted)}. Load the bundle in that dtype (`load(..., dtype=)`), or export again"
                )
        before = self.present_tensors()
        super()._apply(fn, recurse)
        for name, tensor in self._constants.items():
            self._constants[name] = fn(tensor)
        moved = {id(before[name]): tensor for name, tensor in self.present_tensors().items()}
        self.python_state.values = self.python_state.replaced(lambda tensor: moved.get(id(tensor), fn(tensor)))
        tensors = (*self.parameters(), *self.buffers(), *self._constants.values())
        devices = {tensor.device for tensor in tensors}
        if len(devices) == 1:
            self.__dict__["_environment"] = dataclasses.replace(self._environment, device=devices.pop())
            self.changed()
        return self

    def present_tensors(self) -> dict[str, torch.Tensor]:
        """Return the state tensors that the module has now, by name; not copied."""
        slots = {entry.name: self._find(entry.name) for entry in self.bundle.manifest.state}
        found = {name: slot[0].get(slot[1]) for name, slot in slots.items() if slot is not None}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the current tensor of every entry of the manifest's state, by its first name; not copied."""
        slots = {entry.name: self._slot(entry.name) for entry in self.bundle.manifest.state}
        return {name: table[key] for name, (table, key) in slots.items()}

    def train(self, mode: bool = True) -> BundleModule:
        """Choose the programs of train mode, or those of evaluation mode."""
        switch(self, mode)
        if self.__dict__["_changes"]:
            # One may have been of a mode alone.
            self.changed()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a tensor, a submodule, or an attribute that no code read at export (`NotSupported`)."""
        if name in self.__dict__.get("_fixed", ()) and not isinstance(value, nn.Module | torch.Tensor):
            raise NotSupported(
                f"no call looks at the attribute `{name}` of the loaded module: what the model's code read of it was "
                "fixed at export. Set it before the export"
            )
        super().__setattr__(name, value)
        if name == "peft_config" and isinstance(value, dict):
            check_peft_targets(value, self.changes(), self.bundle.manifest)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program of the current mode.

        Raises:
            CallInvalid: the call does not fit the program.
            NotSupported: the bundle has no program for this mode.
        """
        mode = self.training, torch.is_grad_enabled()
        served = self._served.get(mode)
        if served is None:
            served = self._served[mode] = self._method("forward")
        return served(args, self.python_state.passed_with(kwargs))

    def program(self, name: str) -> Callable[..., Any]:
        """Return program `name` as a function of its inputs, in any mode of the module, to its result without taps.

        Raises:
            BundleInvalid: no such program.
        """
        self._called(name)
        return lambda *args, **kwargs: self._called(name)(args, self.python_state.passed_with(kwargs))

    def stepper(self, *, lr: float | Sequence[float] | None = None, max_norm: float | None = None) -> Stepper:
        """Return what makes whole training steps by the program `step`, as an optimizer of torch.

        Args:
            lr: learning rate, one for every group of parameters or one each; None: those of the export.
            max_norm: norm to clip gradients to; None: they are not clipped.

        Raises:
            ArgumentInvalid: another number of rates than of groups.
            NotSupported: the bundle has no program `step`, or one that does not clip.
        """
        from aotexport_runtime.module.stepper import Stepper

        return Stepper(self, lr=lr, max_norm=max_norm)

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._method(method)(args, self.python_state.passed_with(kwargs))

    def _method(self, name: str) -> Call:
        call = self._called(program_of(name, self._methods, training=self.training))
        return tapped(call, self._taps) if self._taps else call

    def _called(self, name: str) -> Call:
        """Return what calls a program, or chooses among its variants."""
        if name not in self._calls:
            self._calls[name] = called(self.bundle, self.bundle.manifest.with_variants(name), self._plan)
        return self._calls[name]

    def _plan(self, name: str) -> Plan:
        if name not in self._plans:
            self._plans[name] = compose(self, self.bundle.program(name))
        return self._plans[name]

    @contextlib.contextmanager
    def submodules_called(self) -> Generator[set[str], None, None]:
        """Let calls call every submodule, for a trace of them; yield the paths of those that a call does not show."""
        untold = self.__dict__["_untold"] = set[str]()
        self.changed()
        try:
            yield untold
        finally:
            self.__dict__["_untold"] = None
            self.changed()

    def explain(self) -> Explanation:
        """Return which engines run each program, on which device, why others do not, and which passes have run so far.

        `print(module.explain())` shows it. Programs that no call has reached are prepared, as by a call.
        """
        return Explanation(self._request.target, tuple(map(self.explain_program, self.bundle.program_names)))

    def explain_program(self, name: str) -> Engines:
        """Return the entry of `explain` for program `name`."""
        try:
            return dataclasses.replace(self._plan(name).record)
        except NotSupported as error:
            return Engines(name, refused=str(error))

    def twin(self, *, target: str | None = None, memo: dict[int, Any] | None = None) -> BundleModule:
        """Return an independent copy, by another engine if `target` names one; `memo` as of `copy.deepcopy`.

        Raises:
            NotSupported: tensors that are tied in the programs no longer are in the module.
        """
        memo = {} if memo is None else memo
        shared = ("bundle", "_environment", "_request", "_targets", "_methods", "_fixed")
        given = {name: self.__dict__[name] for name in shared}
        python_state = copy.copy(self.python_state)
        given |= {name: {} for name in ("_calls", "_loaded", "_plans", "_served")}
        given |= {"_changes": None, "_python_state": python_state}
        twin: BundleModule = copied(self, memo, given)
        python_state.values = self.python_state.copied(memo)
        twin._keep_attributes()
        if target is not None:
            twin.__dict__ |= {"_request": Request(target=target), "_targets": NO_TARGETS}
        return twin

    def over(self, manifest: Manifest, tensors: dict[str, torch.Tensor], *, target: str | None = None) -> BundleModule:
        """Return a module of the same programs over the state of another manifest: detached tensors, shared."""
        bundle = Bundle(self.bundle.directory, manifest)
        request = self._request if target is None else Request(target=target)
        other = BundleModule(bundle, tensors, environment=self._environment, request=request)
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
        """Return the text in `repr`: name and programs."""
        programs = ", ".join(self.bundle.program_names)
        return f"{self.bundle.manifest.name}, programs: {programs}, from {str(self.bundle.root)!r}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: text that opens, without scripts."""
        from aotexport_runtime.module.describe import describe_html

        return describe_html(self.bundle, repr(self))
