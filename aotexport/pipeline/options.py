"""`ExportOptions`: the options of an export, in one record for Python, the command line and model files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from aotexport.errors import ExportFailed, ModelFileInvalid, OutputExists
from aotexport.lower.cpu.levels import own_level
from aotexport.lower.onnx.options import OnnxOptions, check_options
from aotexport.lower.targets import Targets, check_targets
from aotexport.model.programs import AnyExample, Program
from aotexport.process.clock import Progress
from aotexport.torch_internals.releases import check_release
from aotexport.write.weights import SHARD_NBYTES
from aotexport_runtime.bundle.staging import why_not_written
from aotexport_runtime.errors import ArgumentInvalid
from aotexport_runtime.schema.manifest import Verification
from aotexport_runtime.values.arguments import check_type, names_of, path_of, why_unfit_interpreter


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The keywords of `aotexport.export`, which documents each, as `checked` returns them; None: not asked for.

    Attributes:
        left_out: of an export for serving: sentences about what it ships where it can, and cannot here; None: what
            cannot be shipped is an error.
    """

    output: Path
    source_root: Path
    programs: str | Program | Iterable[str | Program] | None = None
    variants: Iterable[AnyExample] = ()
    dynamic_shapes: Any = None
    label_free: bool = True
    targets: Targets = field(default_factory=Targets)
    verify: bool | Literal["fast", "full"] = True
    force: bool = False
    strip: bool = False
    kernel_sources: bool = True
    autocast: Literal["bfloat16", "float16"] | None = None
    keep_operators: tuple[str, ...] = ()
    shard_nbytes: int = SHARD_NBYTES
    onnx: OnnxOptions | None = None
    allow_untested_torch: bool = False
    dump_passes: Path | None = None
    progress: Progress = lambda stage: None
    left_out: tuple[str, ...] | None = None

    @property
    def verification(self) -> Verification:
        """How the bundle is compared with eager execution, as the manifest says it."""
        if isinstance(self.verify, bool):
            return "standard" if self.verify else "none"
        return self.verify

    @classmethod
    def checked(
        cls,
        *,
        output: str | os.PathLike[str],
        source_root: str | os.PathLike[str] | None = None,
        targets: str | Iterable[str] = ("portable",),
        force: bool = False,
        autocast: torch.dtype | str | None = None,
        keep_operators: str | Iterable[str] = (),
        shard_nbytes: int = SHARD_NBYTES,
        onnx: OnnxOptions | bool = False,
        dump_passes: str | os.PathLike[str] | None = None,
        serving: bool = False,
        **others: Any,
    ) -> ExportOptions:
        """Return the options of the keywords of `aotexport.export`.

        With `serving`, ONNX models and libraries for this machine's processor are added, as far as they can be made.

        Raises:
            ArgumentInvalid: one is of a wrong type, or `verify` of another value.
            ModelFileInvalid: a target or an option of ONNX models is wrong, or a package that they need is missing.
            OutputExists: something is at `output`.
            ExportFailed: the release of torch is not among those that the tests are run with.
        """
        left_out: list[str] = []
        if serving:
            targets, onnx = _for_serving(names_of("targets", targets), onnx or OnnxOptions(), left_out)
        check_type("shard_nbytes", shard_nbytes, int, "a number of bytes")
        check_type("onnx", onnx, (bool, OnnxOptions), "True, False or `OnnxOptions`")
        options = cls(
            output=path_of("output", output),
            source_root=path_of("source_root", source_root or os.getcwd()).absolute(),
            targets=check_targets(names_of("targets", targets)),
            force=force,
            autocast=_autocast(autocast),
            keep_operators=names_of("keep_operators", keep_operators),
            shard_nbytes=shard_nbytes,
            onnx=OnnxOptions() if onnx is True else onnx or None,
            dump_passes=None if dump_passes is None else path_of("dump_passes", dump_passes),
            left_out=tuple(left_out) if serving else None,
            **others,
        )
        if not isinstance(options.verify, bool) and options.verify not in ("fast", "full"):
            raise ArgumentInvalid(f"`verify` must be True, False, 'fast' or 'full', not {options.verify!r}")
        if unfit := why_unfit_interpreter():
            raise ExportFailed(unfit)
        if not options.allow_untested_torch:
            check_release()
        if reason := why_not_written(options.output, force=force):
            raise OutputExists(reason)
        if options.onnx is not None:
            check_options(options.onnx)
        return options


def _autocast(dtype: torch.dtype | str | None) -> Any:
    """Return the name of a dtype of autocast."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in ("bfloat16", "float16"):
        raise ArgumentInvalid(f"`autocast` must be torch.bfloat16 or torch.float16, not {dtype!r}")
    return None if dtype is None else name


def _for_serving(
    targets: Sequence[str], onnx: OnnxOptions | Literal[True], left_out: list[str]
) -> tuple[Sequence[str], OnnxOptions | bool]:
    """Return targets and options of ONNX models for serving; `left_out` takes what cannot be made here."""
    options = OnnxOptions() if onnx is True else onnx
    found: OnnxOptions | bool = options
    try:
        check_options(options)
    except ModelFileInvalid as error:
        left_out.append(f"the bundle has no ONNX models: {error}")
        found = False
    compiler = os.environ.get("CXX", "g++")
    if any(target.startswith("cpu") for target in targets):
        return targets, found
    if own_level() is None or shutil.which(compiler) is None:
        reason = f"no C++ compiler `{compiler}`" if own_level() else "no processor of a level of target `cpu`"
        left_out.append(f"the bundle has no libraries: this machine has {reason}")
        return targets, found
    return (*targets, "cpu"), found
