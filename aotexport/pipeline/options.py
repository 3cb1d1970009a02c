"""`ExportOptions`: the options of an export, in one record for Python, the command line and model files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from aotexport.errors import ExportFailed, OutputExists
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
    """The keywords of `aotexport.export`, which documents each, as `checked` returns them; None: not asked for."""

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
        **others: Any,
    ) -> ExportOptions:
        """Return the options of the keywords of `aotexport.export`.

        Raises:
            ArgumentInvalid: one is of a wrong type, or `verify` of another value.
            ModelFileInvalid: a target or an option of ONNX models is wrong, or a package that they need is missing.
            OutputExists: something is at `output`.
            ExportFailed: the release of torch is not among those that the tests are run with.
        """
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
    """Return the name of a dtype of autocast.

    Raises:
        ArgumentInvalid: autocast has no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in ("bfloat16", "float16"):
        raise ArgumentInvalid(f"`autocast` must be torch.bfloat16 or torch.float16, not {dtype!r}")
    return None if dtype is None else name
