"""A loaded bundle as an `nn.Module` with the original names."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, Self

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
from aotexport_runtime.module.state import BundleState
from aotexport_runtime.module.stepper import Stepper
from aotexport_runtime.schema.manifest import IN_EVAL, TRANSFORMERS, Manifest
from aotexport_runtime.submodules.changes import check_peft_targets
from aotexport_runtime.submodules.python_state import PythonState
from aotexport_runtime.submodules.submodule import build, copied, switch, unread
from aotexport_runtime.submodules.tables import LoadedState, Origin, are_all_hooked, seal


class BundleModule(BundleState):
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
        version: torch.Tensor | None = None,
    ) -> None:
        """Build the module over `tensors` by name, which it owns from now on; use `aotexport_runtime.load`.

        `targets` is the native code that may run, whose files the caller trusts; `taps`: see `load`. `version`: a
        tensor whose version counts the writes to all `tensors`; None: there is none.
        """
        super().__init__(bundle, environment, request, targets)
        self._calls: dict[str, Call] = {}
        self._plans: dict[str, Plan] = {}
        self._served: dict[tuple[bool, bool, bool], Call] = {}
        self._methods = methods_of(bundle)
        self._fixed = frozenset(bundle.manifest.settings)
        self._taps = tuple(taps)
        # Last: a name of the user's may equal one of ours, which can then no longer be assigned to.
        self._constants.update(
            build(self, bundle.manifest, tensors, lambda leaf: constant_value(leaf.value, environment))
        )
        if TRANSFORMERS in bundle.manifest.extensions:
            self._fixed -= self._describe(bundle.manifest)
        # Bypasses `__setattr__`, which handles the user's names.
        self.__dict__["_python_state"] = PythonState(bundle.manifest.attributes, [*self.state_tensors().values()])
        self._keep_attributes()
        self.__dict__["_origin"] = Origin(self, "")
        found = bundle.manifest.extensions.get(IN_EVAL)
        in_eval = {*map(str, found)} if isinstance(found, list) else set[str]()
        for module in self.modules():
            seal(module)
            module.__dict__["_origin"].in_eval = module.__dict__["_origin"].path in in_eval
        self.train(bundle.manifest.training)
        add_taps(self, bundle, taps)
        if request.frozen:
            ties = {entry.name: entry.tied for entry in bundle.manifest.state}
            puts = any(bundle.program(name).rebinds for name in bundle.program_names)
            self.__dict__["_loaded"] = LoadedState(self.state_tensors(), None if puts else self._find, ties, version)

    def changed(self) -> None:
        """Compose the programs anew at their next call, with the submodules of that time."""
        super().changed()
        for made in ("_calls", "_plans", "_served"):
            self.__dict__[made].clear()

    def train(self, mode: bool = True) -> BundleModule:
        """Choose the programs of train mode, or those of evaluation mode."""
        switch(self, mode)
        if self.__dict__["_changes"]:
            # One may have been of a mode alone.
            self.changed()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a tensor, a submodule, or an attribute that no code read at export (`NotSupported`)."""
        if name in self.__dict__.get("_fixed", ()) and not isinstance(value, nn.Module | nn.Parameter):
            raise NotSupported(unread(name, ""))
        super().__setattr__(name, value)
        if name == "peft_config" and isinstance(value, dict):
            check_peft_targets(value, self.changes(), self.bundle.manifest)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program of the current mode.

        Raises:
            CallInvalid: the call does not fit the program.
            NotSupported: the bundle has no program for this mode.
        """
        mode = self.training, torch.is_grad_enabled(), are_all_hooked()
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
        return Stepper(self, lr=lr, max_norm=max_norm)

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._method(method)(args, self.python_state.passed_with(kwargs))

    def _method(self, name: str) -> Call:
        call = self._called(program_of(name, self._methods, training=self.training))
        return tapped(call, self._taps) if self._taps else call

    def _called(self, name: str) -> Call:
        """Return what calls a program, or chooses among its variants."""
        if self._hooked is not (hooked := are_all_hooked()):
            self.__dict__ |= {"_hooked": hooked, "_untold": set() if hooked else None}
            self.changed()
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
        given |= {name: {} for name in ("_calls", "_plans", "_served")}
        given |= {"_changes": None, "_python_state": python_state, "_loaded": LoadedState({})}
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
