"""A bundle loaded for inference by its ONNX models. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aotexport_runtime.bundle.read import Bundle
from aotexport_runtime.call.plan import Call, Plan, called
from aotexport_runtime.engines.candidates import ONNX
from aotexport_runtime.engines.onnx.engine import OnnxEngine
from aotexport_runtime.engines.onnx.session import ModelRuntime, OnnxRuntime
from aotexport_runtime.engines.openvino.session import OpenVino
from aotexport_runtime.engines.runs import Engines, Explanation
from aotexport_runtime.errors import NotSupported
from aotexport_runtime.guards.arguments import argument_rows
from aotexport_runtime.guards.rule import ARRAYS, torch_tensors
from aotexport_runtime.module.onnx_stepper import OnnxStepper
from aotexport_runtime.module.optimizer import holding, optimizer_of
from aotexport_runtime.schema.manifest import STEP, OnnxModel, step_program
from aotexport_runtime.schema.program import ArgumentInput, Program
from aotexport_runtime.schema.trees import Constant


def runtime_of(engine: str) -> OnnxRuntime | OpenVino:
    """Return the runtime of one of `MODEL_ENGINES`."""
    return OnnxRuntime() if engine == ONNX else OpenVino()


def compose_onnx(
    bundle: Bundle, program: Program, model: OnnxModel, options: ModelRuntime, state: dict[str, Any]
) -> Plan:
    """Return a program, ready to be called, by its ONNX model; see `OnnxEngine`."""
    engine = OnnxEngine(bundle, program, model, options, state)
    # Tensors elsewhere are copied, wherever the program was captured.
    captured = [spec.meta.device for spec in program.inputs if isinstance(spec, ArgumentInput)]
    guards = argument_rows(program, ("cpu", *captured))
    record = Engines(program.name, engine.session.device, (engine.name,))
    return Plan(program, [engine], record, [guards], [lambda: ARRAYS, torch_tensors], _constant)


def _constant(leaf: Constant) -> Any:
    """Return the value of a constant leaf; torch is imported only for torch's own types."""
    value = leaf.value
    if value is None or isinstance(value, bool | int | float):
        return value
    from aotexport_runtime.execution.codegen import Environment, constant_value

    return constant_value(value, Environment())


class OnnxModule:
    """A bundle whose programs run by their ONNX models: called like the exported module in evaluation mode.

    Arrays of numpy give arrays of numpy, tensors of torch give tensors of torch.

    Attributes:
        bundle: the open bundle.
        state: values of the state tensors that calls have changed, by name, as the models have them; empty at first.
            Removing a value restores that of the bundle.
    """

    def __init__(self, bundle: Bundle, options: ModelRuntime) -> None:
        """Open the model of the bundle's first program; use `aotexport_runtime.load(path, target="onnx")`."""
        if not bundle.manifest.onnx:
            raise NotSupported("the bundle has no ONNX models; add them with `aotexport onnx`, or load another target")
        self.bundle = bundle
        self.state: dict[str, Any] = {}
        self._options = options
        self._models = {model.program: model for model in bundle.manifest.onnx}
        self._step = step_program(bundle.manifest)
        self._composed: dict[str, Plan] = {}
        self._calls: dict[str, Call] = {}
        self._methods: dict[str, str] = {}
        for entry in bundle.manifest.programs:
            if entry.variant_of is None and entry.name in self._models and entry.name != self._step:
                self._methods.setdefault(bundle.program(entry.name).method, entry.name)
        self._forward = self._method("forward") if "forward" in self._methods else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            CallInvalid: the call does not fit the program.
            NotSupported: the bundle has no ONNX model of `forward`, or the call needs gradients.
        """
        return (self._forward or self._method("forward"))(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return a method that the bundle has an ONNX model of."""
        if name in self.__dict__.get("_methods", ()):
            return lambda *args, **kwargs: self._method(name)(args, kwargs)
        raise AttributeError(f"a bundle loaded for ONNX Runtime has no attribute {name!r}")

    def stepper(
        self, *, lr: float | Sequence[float] | None = None, max_norm: float | None = None, seed: int = 0
    ) -> OnnxStepper:
        """Return what makes whole training steps by the program `step`; it changes `state`.

        Args:
            lr: learning rate, one for every group of parameters or one each; None: those of the export.
            max_norm: norm to clip gradients to; None: they are not clipped.
            seed: what dropout draws by, with the number of steps.

        Raises:
            ArgumentInvalid: another number of rates than of groups.
            NotSupported: the bundle has no ONNX model of a program `step`, or one that does not clip.
        """
        optimizer = optimizer_of(self.bundle.manifest)
        return OnnxStepper(self.bundle, optimizer, self.plan(STEP), self.state, lr=lr, max_norm=max_norm, seed=seed)

    def program(self, name: str) -> Callable[..., Any]:
        """Return program `name` as a function of its inputs; errors: see `plan`."""
        if name == self._step:
            raise NotSupported(f"program `{name}` is a training step, which `module.stepper()` makes")
        call = self._call(name)
        return lambda *args, **kwargs: call(args, kwargs)

    def session(self, name: str) -> Any:
        """Return the `onnxruntime.InferenceSession`, or `openvino.CompiledModel`, of a program; errors: see `plan`."""
        (engine,) = self.plan(name).engines
        assert isinstance(engine, OnnxEngine)
        return engine.session.handle

    def plan(self, name: str) -> Plan:
        """Return the plan of program `name`, without variants; `NotSupported`: the bundle has no ONNX model of it."""
        if name not in self._models:
            raise NotSupported(self._without(name))
        if name not in self._composed:
            program, model = self.bundle.program(name), self._models[name]
            program = holding(program) if name == self._step else program
            self._composed[name] = compose_onnx(self.bundle, program, model, self._options, self.state)
        return self._composed[name]

    def explain(self) -> Explanation:
        """Return which programs run by their models, on what, and why not the others."""
        found: list[Engines] = []
        for name in self.bundle.program_names:
            try:
                found.append(self.plan(name).record)
            except NotSupported as error:
                found.append(Engines(name, refused=str(error)))
        return Explanation(self._options.engine, tuple(found))

    def eval(self) -> OnnxModule:
        """Return the module itself, which is always in evaluation mode."""
        return self

    def _without(self, name: str) -> str:
        return f"the bundle has no ONNX model of `{name}`; it has one of {', '.join(self._models)}"

    def _method(self, name: str) -> Call:
        if name not in self._methods:
            raise NotSupported(self._without(name))
        return self._call(self._methods[name])

    def _call(self, name: str) -> Call:
        """Return what calls a program, or chooses among its variants."""
        if name not in self._calls:
            names = [each for each in self.bundle.manifest.with_variants(name) if each in self._models]
            self._calls[name] = called(self.bundle, names or [name], self.plan)
        return self._calls[name]
