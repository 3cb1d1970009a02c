"""Options of an export and of a derived bundle: the keywords of `export` and `derive`, each written once.

Fields have the types that stages find; a record takes what people write: names, paths as text, dtypes.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from aotexport.errors import ExportFailed, ModelFileInvalid
from aotexport.lower.targets import OnnxOptions, Targets, check_options, check_targets, own_level
from aotexport.model.programs import AnyExample, Program
from aotexport.model.step import Step, step_of
from aotexport.process.clock import Progress
from aotexport.torch_internals.releases import check_release
from aotexport.write.weights import SHARD_NBYTES
from aotexport_runtime.bundle.staging import why_not_written
from aotexport_runtime.errors import ArgumentInvalid, OutputExists
from aotexport_runtime.schema.manifest import Verification
from aotexport_runtime.values.arguments import check_type, names_of, path_of, why_unfit_interpreter


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How a bundle is made.

    Attributes:
        output: directory to write the bundle to.
        targets: forms to ship; `portable` always is. `cpu`: shared libraries for this machine's processor, `cpu:v3,v4`
            for these levels of x86-64. `cuda`: kernels for NVIDIA GPUs, `cuda:sm_80,sm_90` for those.
        verify: compare the written bundle with eager execution, in a fresh process; `fast`: in fewer calls, `full`: in
            more. The manifest says which. False: functional graphs and libraries that differ from eager stay in it.
        force: replace a bundle at `output`.
        strip: leave source lines and module paths out.
        shard_nbytes: size above which weights are split in several files.
        onnx: add ONNX models of the programs that record no gradients; options, or True for the defaults.
        step: add the program `step`, a whole training step with this optimizer: a `Step`, or the text of one, as
            `adamw` or `sgd:momentum=0.9`.
        allow_untested_torch: export with a release of torch that the tests were not run with.
        progress: called with the name of each stage as it begins.
    """

    output: Path
    targets: str | Iterable[str] = ("portable",)
    verify: bool | Literal["fast", "full"] = True
    force: bool = False
    strip: bool = False
    shard_nbytes: int = SHARD_NBYTES
    onnx: OnnxOptions | bool = False
    step: Step | str | None = None
    allow_untested_torch: bool = False
    progress: Progress = lambda stage: None

    def __post_init__(self) -> None:
        """Refuse options that nothing can be exported with.

        Raises:
            ArgumentInvalid: one is of a wrong type, or `verify` of another value.
            ModelFileInvalid: a target or an option of ONNX models is wrong, or a package that they need is missing.
            OutputExists: something is at `output`.
            ExportFailed: the release of torch is not among those that the tests are run with.
        """
        self._set("output", path_of("output", self.output))
        check_type("shard_nbytes", self.shard_nbytes, int, "a number of bytes")
        check_type("onnx", self.onnx, (bool, OnnxOptions), "True, False or `OnnxOptions`")
        self._set("targets", names_of("targets", self.targets))
        check_targets(self.targets)
        if not isinstance(self.verify, bool) and self.verify not in ("fast", "full"):
            raise ArgumentInvalid(f"`verify` must be True, False, 'fast' or 'full', not {self.verify!r}")
        if unfit := why_unfit_interpreter():
            raise ExportFailed(unfit)
        if not self.allow_untested_torch:
            check_release()
        if reason := why_not_written(self.output, force=self.force):
            raise OutputExists(reason)
        if self.step is not None:
            check_type("step", self.step, (str, Step), "a `Step`, or the text of one")
            self._set("step", step_of(self.step))
        if self.onnx:
            onnx = OnnxOptions() if self.onnx is True else self.onnx
            check_options(onnx)
            self._set("onnx", onnx)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @functools.cached_property
    def built(self) -> Targets:
        """The targets, as they are built."""
        return check_targets(self.targets)

    @property
    def verification(self) -> Verification:
        """How the bundle is compared with eager execution, as the manifest says it."""
        if isinstance(self.verify, bool):
            return "standard" if self.verify else "none"
        return self.verify


@dataclass(frozen=True, kw_only=True)
class ExportOptions(WriteOptions):
    """How a model is exported.

    Attributes:
        programs: names among `train`, `infer`, `eval-joint`, and descriptions of others; None: `train` and `infer` for
            a module that is in train mode or has trainable parameters, else `train` when an input requires grad, else
            `infer`.
        variants: further example calls, with other signatures than `args` and `kwargs` have: a call of the bundle runs
            the first that it fits. A tuple is positional arguments, a dict keyword arguments.
        dynamic_shapes: the sizes that may differ from the example's, in the form of `torch.export.export`.
        label_free: where the example holds labels, capture programs that record no gradients for calls without them
            too, see `with_label_free`.
        serving: add ONNX models and libraries for this machine's processor, as far as they can be made here.
        autocast: `bfloat16` or `float16`: serve calls under autocast to this dtype, on the device of the model, too.
            Programs whose code does something else then, by the dtypes of values, get a variant that is captured
            under it. Loads in this dtype (`load(dtype=)`) are served too, by graphs captured from the cast model.
        keep_operators: custom operators written in Python, by name (`library::operator`) or namespace (`library`), to
            keep as operators, whose package a load needs; others are traced through.
        source_root: directory that recorded source files are relative to; None: the working directory.
        dump_passes: directory for the forward graph of each program as text, as traced and after each pass.
    """

    programs: str | Program | Iterable[str | Program] | None = None
    variants: Iterable[AnyExample] = ()
    dynamic_shapes: Any = None
    label_free: bool = True
    serving: bool = False
    autocast: str | None = None
    keep_operators: str | Iterable[str] = ()
    source_root: Path | None = None
    dump_passes: Path | None = None

    left_out: tuple[str, ...] = field(init=False, default=())
    """Sentences about what an export for serving cannot ship here."""

    def __post_init__(self) -> None:
        """Refuse options as `WriteOptions` does."""
        if self.serving:
            self._add_for_serving()
        self._set("source_root", path_of("source_root", self.source_root or os.getcwd()).absolute())
        self._set("keep_operators", names_of("keep_operators", self.keep_operators))
        if self.dump_passes is not None:
            self._set("dump_passes", path_of("dump_passes", self.dump_passes))
        if self.autocast is not None:
            name = str(self.autocast).removeprefix("torch.")
            if name not in ("bfloat16", "float16"):
                raise ArgumentInvalid(f"`autocast` must be torch.bfloat16 or torch.float16, not {self.autocast!r}")
            self._set("autocast", name)
        super().__post_init__()

    def _add_for_serving(self) -> None:
        """Add what serves fast; note what this machine cannot make."""
        left_out: list[str] = []
        onnx = self.onnx if isinstance(self.onnx, OnnxOptions) else OnnxOptions()
        try:
            check_options(onnx)
            self._set("onnx", onnx)
        except ModelFileInvalid as error:
            left_out.append(f"the bundle has no ONNX models: {error}")
            self._set("onnx", False)
        targets, compiler = names_of("targets", self.targets), os.environ.get("CXX", "g++")
        if not any(target.startswith("cpu") for target in targets):
            if own_level() is None or shutil.which(compiler) is None:
                reason = f"no C++ compiler `{compiler}`" if own_level() else "no processor of a level of target `cpu`"
                left_out.append(f"the bundle has no libraries: this machine has {reason}")
            else:
                self._set("targets", (*targets, "cpu"))
        self._set("left_out", tuple(left_out))


@dataclass(frozen=True, kw_only=True)
class DeriveOptions(WriteOptions):
    """What a derived bundle has that its parent has not.

    Attributes:
        freeze: patterns of names of parameters that take no gradient: `encoder.*`. The joint graph leaves theirs out.
        lora: directory of an adapter of the bundle, in peft's files; the new bundle has it beside frozen weights.
        merge: write the adapter into the weights instead, which are as frozen as before.
        dtype: `bfloat16`, `float16`, `float32` or `float64`: the bundle of `model.to(dtype)`, with floating example
            arguments in it; an adapter is merged before. Code that chose its way by a dtype went the way of the dtype
            at the first export.
        dynamic: narrower ranges of dynamic sizes, and equal ones, as `--dynamic` takes them: `x:0=batch[1:64]`. Sizes
            that the bundle has fixed stay so: a graph does not tell where the model's code read them as numbers.
        programs: names of programs: those of the bundle, and of `train`, `infer`, `eval-joint` those of a mode that
            the bundle has a program of. None: those of the bundle.
        resize_embeddings: number of tokens that a language model of a recipe shall read and score; new rows are drawn
            about the mean of the others. None: as many as before.
        quantize: `int4` or `int8`: linear layers compute their weights of integers, in torchao's layouts; adapters are
            trained over them.
    """

    freeze: str | Iterable[str] = ()
    lora: str | os.PathLike[str] | None = None
    merge: bool = False
    dtype: torch.dtype | None = None
    dynamic: str | Iterable[str] = ()
    programs: str | Iterable[str] | None = None
    resize_embeddings: int | None = None
    quantize: Literal["int4", "int8"] | None = None

    def __post_init__(self) -> None:
        """Refuse options as `WriteOptions` does, and `merge` without an adapter (`ModelFileInvalid`)."""
        for name in ("freeze", "dynamic", "programs"):
            if getattr(self, name) is not None:
                self._set(name, names_of(name, getattr(self, name)))
        super().__post_init__()
        if self.merge and self.lora is None:
            raise ModelFileInvalid("merge: there is no adapter to merge; give its directory (`lora`, `--lora`)")
