"""`Servable`: a bundle that a server calls by the names of its inputs."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from aotexport_runtime.bundle.read import Bundle, open_bundle
from aotexport_runtime.commands.results import check_results
from aotexport_runtime.engines.candidates import MODEL_ENGINES, ONNX
from aotexport_runtime.errors import CallInvalid, NotSupported
from aotexport_runtime.schema.manifest import CLASSES
from aotexport_runtime.serving.batcher import Answer, Batcher, Waiting
from aotexport_runtime.serving.interface import BatchAxes, TensorSpec, TextSpec, is_rare, join_key
from aotexport_runtime.serving.joining import REFUSALS, AnyProgram, Values, batch_of, paces, run_together
from aotexport_runtime.serving.options import ServableOptions
from aotexport_runtime.values.arguments import check_torch, keywords_of
from aotexport_runtime.values.tensors import is_torch_tensor

log = logging.getLogger("aotexport_runtime")

_KINDS = "biufc"
"""Kinds of arrays that tensors have."""


class Servable:
    """A loaded bundle for inference: named tensors in, named tensors out.

    It runs the program of `forward` in evaluation mode, without gradients. Calls may come from any thread, and run one
    after the other in a thread of its own.

    Attributes:
        inputs: one entry per input.
        outputs: one entry per output.
        texts: one entry per string of the signature, which calls may name as they do inputs.
        engine: what serves its calls, by the names of `load`; empty before `warm_up`.
        classes: names of the classes that a classifier scores, if the bundle has them.
        batcher: the queue of calls.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    texts: tuple[TextSpec, ...]
    engine = ""

    @keywords_of(ServableOptions)
    def __init__(self, path: str | os.PathLike[str], options: ServableOptions) -> None:
        """Load the bundle at `path`; nothing has run yet, see `warm_up`.

        Args:
            path: directory of the bundle.
            options: as keywords, see below.

        Raises:
            ArgumentInvalid: an argument is of a wrong type, or below its least value; or an adapter cannot be read, or
                was trained on other weights.
            BundleInvalid: see `load`.
            NotSupported: see `load`; or the bundle has no program that clients can call.
        """
        self._bundle = open_bundle(path, limits=options.limits)
        self._batches: dict[int, BatchAxes | None] = {}
        self._not_joined: dict[int, str] = {}
        self._pad = options.pad
        self.batcher = Batcher(self._run, options)
        self._program: AnyProgram | None = self.batcher.apply(lambda: _loaded(self._bundle, options))
        self.inputs = self._program.interface.inputs
        self.outputs = self._program.interface.outputs
        self.texts = self._program.interface.texts
        self.classes: Any = self._bundle.manifest.extensions.get(CLASSES, ())

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return self.batcher.waiting

    @property
    def batch_axes(self) -> BatchAxes | None:
        """Where calls that name no string may be joined; None: nowhere, or `warm_up` has not shown it."""
        return self._batches.get(0)

    @property
    def not_joined(self) -> str:
        """Why calls that name no string are joined along no axis, or not along the likeliest; empty: they are."""
        return self._not_joined.get(0, "")

    def warm_up(self) -> None:
        """Run the recorded calls, compare with what eager gave, and find out whether calls can be joined.

        Raises:
            SelfTestFailed: an answer differs; the message lists the differences.
            NotSupported: calls change the module's state, so that an answer could depend on other clients.
        """
        program = self._served()
        self.batcher.apply(lambda: self._prove(program))
        most = [axes.most for axes in self._batches.values() if axes is not None and axes.most is not None]
        self.batcher.max_batch_size = min([self.batcher.max_batch_size, *most])

    def recorded_call(self) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return the inputs of a recorded call by name, as `infer` takes them; None: the bundle holds none.

        Raises:
            BundleInvalid: the record is invalid.
            NotSupported: the servable is closed.
        """
        program = self._served()
        entry = next(iter(program.recorded_calls), None)
        if entry is None:
            return None
        values = self.batcher.apply(lambda: program.values_of(entry))
        named = {spec.name: _as_array(value) for spec, value in zip(self.inputs, values, strict=True)}
        return named | {text.name: np.array([text.values[0]], object) for text in self.texts}

    def infer(self, inputs: Mapping[str, Any], *, adapter: str | None = None) -> dict[str, Any]:
        """Return the outputs of a call, by name.

        Args:
            inputs: an array, tensor or number per input, by name; borrowed: what the model writes into an argument
                changes the caller's. A float32 array for an input of a dtype that numpy lacks is rounded to it. Strings
                of `texts` may be among them, and choose the variant that was captured with them.
            adapter: name of the adapter that the call applies; None: none.

        Returns:
            Tensors if a tensor was passed; else arrays, with the tensors' memory; as float32 where numpy lacks the
            dtype. A number is an array of no axes.

        Raises:
            CallInvalid: names are missing or unknown, or a value does not fit; lists every violation.
            Overloaded: as many calls wait already as may.
            NotSupported: the servable is closed.
        """
        values, choice = self._values(inputs, adapter)
        result = Answer()
        return self.batcher.submit(Waiting(call=(inputs, values, adapter, choice, result), result=result)).result()

    def submit(
        self,
        inputs: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        adapter: str | None = None,
        at_once: bool = False,
    ) -> Answer:
        """Queue a call, which may be joined with others; return the future of what `infer` returns.

        Joined calls are run as one batch, along `batch_axes`: their answers equal those of each alone but for the last
        bits, since kernels add in another order for other sizes. If the batch fails, each of its calls runs alone.

        Args:
            inputs: see `infer`; left alone until the result is there. Arguments of joined calls are not written to.
            timeout_s: how long the call may wait before it runs, in seconds; None: for any time.
            adapter: see `infer`; calls of one adapter are joined.
            at_once: run it in this thread, where it takes less than 2 ms, `threads` is 1, and no other waits or runs.

        Returns:
            A future with the result, with what `infer` raises (`CallInvalid`, `Overloaded` and `NotSupported` are
            raised at once), or with `DeadlinePassed`. It can be cancelled while the call waits, and tells how long the
            call waited and ran.
        """
        values, choice = self._values(inputs, adapter)
        key, size, length = self._key(values, choice, adapter)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        result = Answer()
        call = (inputs, values, adapter, choice, result)
        waiting = Waiting(call=call, key=key, size=size, length=length, deadline=deadline, result=result)
        return self.batcher.submit(waiting, at_once=at_once)

    def close(self) -> None:
        """Answer the calls that wait, and let go of the module; later calls are refused."""
        self.batcher.close()
        self._program = None

    def _key(self, values: Values, choice: int, adapter: str | None) -> tuple[Hashable, int, int]:
        """Return what calls of one batch share, None: it is joined with none; its size, and the length to pad."""
        axes = self._batches.get(choice)
        joinable = None if axes is None else join_key(self.inputs, axes, values)
        return ((adapter, choice, joinable[0]), *joinable[1:]) if joinable else (None, 1, 1)

    def _prove(self, program: AnyProgram) -> None:
        with program.applying(None):
            again = [*program.run_recorded()]
            check_results(result for _, result in again)
            self.engine = program.engine
            recorded = [values for values, _ in again]
            if not recorded:
                root = self._bundle.root
                log.warning("%s has no recorded calls of program %s: nothing was checked", root, program.name)
            choices, most = program.interface.choices, self.batcher.max_batch_size
            for choice in {choices.index(each) for each in choices}:
                self._batches[choice], self._not_joined[choice] = batch_of(program, recorded, choice, most, self._pad)
                if reason := self._not_joined[choice]:
                    log.info("program %s: calls are not joined: %s", program.variants[choice], reason)
                if (axes := self._batches[choice]) and recorded:
                    # Of the kind of the server's calls.
                    pairs = zip(self.inputs, recorded[0], strict=True)
                    values = [value if is_rare(spec.dtype) else _as_array(value) for spec, value in pairs]
                    with contextlib.suppress(*REFUSALS):
                        key, _, length = self._key(values, choice, None)
                        for size, seconds in paces(program, values, axes, choice, most):
                            self.batcher.pace.note(key, size, seconds, length)

    def _run(self, calls: Sequence[tuple[Mapping[str, Any], Values, str | None, int, Answer]]) -> list[dict[str, Any]]:
        """Return the outputs of calls of one adapter and one choice of strings."""
        program = self._served()
        _, _, adapter, choice, _ = calls[0]
        with program.applying(adapter):
            results = run_together(program, [call[1] for call in calls], self._batches.get(choice), choice)
        for call in calls:
            call[-1].engine_ran = program.ran
        return [self._named(call[0], outputs) for call, outputs in zip(calls, results, strict=True)]

    def _served(self) -> AnyProgram:
        if self._program is None:
            raise NotSupported(f"the servable of `{self._bundle.root}` is closed")
        return self._program

    def _values(self, inputs: Mapping[str, Any], adapter: str | None) -> tuple[Values, int]:
        """Return a value per input, and the choice of the strings."""
        program = self._served()
        names = [spec.name for spec in (*self.inputs, *self.texts)]
        expected = ", ".join(f"`{name}`" for name in names)
        violations = [f"`{spec.name}`: missing" for spec in self.inputs if spec.name not in inputs]
        violations += [f"`{name}`: no such input; there are {expected}" for name in inputs if name not in names]
        values = [_value_of(spec, inputs[spec.name], violations) for spec in self.inputs if spec.name in inputs]
        named = {
            text.name: _text_of(text.name, inputs[text.name], violations) for text in self.texts if text.name in inputs
        }
        choice = program.interface.choice(named, violations)
        if adapter is not None and adapter not in program.adapters:
            there = ", ".join(f"`{name}`" for name in program.adapters) or "none"
            violations.append(f"there is no adapter `{adapter[:100]}`; there are {there}")
        if violations:
            raise CallInvalid(program.name, violations)
        rounded = [
            program.rounded(value, spec.dtype)
            if is_rare(spec.dtype) and isinstance(value, np.ndarray) and value.dtype == np.float32
            else value
            for spec, value in zip(self.inputs, values, strict=True)
        ]
        return rounded, choice

    def _named(self, inputs: Mapping[str, Any], outputs: list[Any]) -> dict[str, Any]:
        """Return outputs by name, of the kind of the inputs."""
        values = outputs if any(map(is_torch_tensor, inputs.values())) else map(_as_array, outputs)
        return {spec.name: value for spec, value in zip(self.outputs, values, strict=True)}


def _loaded(bundle: Bundle, options: ServableOptions) -> AnyProgram:
    """Return the program; torch is imported unless the engine runs ONNX models, as `load` chooses."""
    engine = options.engine or "auto"
    if engine == "auto" and bundle.manifest.onnx and importlib.util.find_spec("torch") is None:
        engine = ONNX
    if engine not in MODEL_ENGINES:
        check_torch(f"engine `{engine}`")
        from aotexport_runtime.serving.program import ServedProgram

        return ServedProgram(bundle, engine, options)
    from aotexport_runtime.serving.onnx_program import OnnxProgram

    if options.device != "cpu":
        raise NotSupported(f"engine `{engine}` runs on the CPU, not on `{options.device}`")
    if options.adapters:
        raise NotSupported(f"engine `{engine}` applies no adapters; run the bundle by torch, or merge them into it")
    return OnnxProgram(bundle, engine, threads=options.threads)


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    """Return an output as an array, with the tensor's memory if it can; bfloat16 and float8 as float32."""
    if not is_torch_tensor(value):
        return np.asarray(value, np.int64) if isinstance(value, int) else value
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    return (tensor.float() if is_rare(str(tensor.dtype).removeprefix("torch.")) else tensor).numpy()


def _text_of(name: str, value: Any, violations: list[str]) -> str:
    """Return a string of a call, which is one by itself or the element of an array; report what is none."""
    found = np.asarray(value, object).ravel()
    text = found[0] if found.size == 1 else value
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    if not isinstance(text, str):
        violations.append(f"`{name}`: expected a string, got {text!r:.100}")
        return ""
    return text


def _value_of(spec: TensorSpec, value: Any, violations: list[str]) -> Any:
    """Return a value of a call as an array, tensor or integer; report one that is none."""
    if not is_torch_tensor(value):
        value = np.asarray(value)
        if value.dtype.kind not in _KINDS:
            violations.append(f"`{spec.name}`: expected an array or a tensor, got an array of {value.dtype}")
            return value
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
    if spec.is_number:
        if math.prod(value.shape) != 1 or "int" not in str(value.dtype):
            violations.append(f"`{spec.name}`: expected an integer, got {value.dtype}{list(value.shape)}")
            return 0
        return int(value.item())
    return value
