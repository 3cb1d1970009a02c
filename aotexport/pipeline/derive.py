"""`derive`: a bundle of a bundle, without the model's code."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import os
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from aotexport.errors import ModelFileInvalid
from aotexport.model.bundle_source import programs_named, source_of, variants_under_autocast
from aotexport.model.cast import cast
from aotexport.model.dynamic_option import narrowed
from aotexport.model.quantized import quantize
from aotexport.model.step import step_in
from aotexport.pipeline.export import export_as
from aotexport.pipeline.options import DeriveOptions, ExportOptions, WriteOptions
from aotexport.verify.fresh import FreshProcess
from aotexport.verify.report import ExportReport
from aotexport_runtime.adapters import load_adapter, merge_adapter
from aotexport_runtime.engines.candidates import AUTOGRAD, Request
from aotexport_runtime.engines.select import NO_TARGETS
from aotexport_runtime.generation.language_model import LanguageModel
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import in_dtype
from aotexport_runtime.module.loading import load
from aotexport_runtime.schema.manifest import STEP, step_program
from aotexport_runtime.values.arguments import check_type, keywords_of


@keywords_of(DeriveOptions)
def derive(bundle: BundleModule | str | os.PathLike[str], options: DeriveOptions) -> ExportReport:
    """Make a bundle of a bundle: with its current weights and layers, other frozen weights, programs or targets.

    The forward graphs are captured anew, with the recorded calls of the bundle as examples; the model's code is not
    needed. The manifest says of which bundle the new one was made, and what was changed.

    Args:
        bundle: a loaded bundle, trained or changed since or not; or the directory of one. Left as it is.
        options: as keywords, see below.

    Returns:
        The written bundle, its programs and the comparisons of them with the forward graphs of `bundle`.

    Raises:
        ArgumentInvalid: an argument is of a wrong type; or the adapter cannot be read, or is of another bundle; or
            `dtype` is given for a module with other submodules or adapters.
        BundleInvalid: there is no bundle, or it is broken.
        ExportFailed: the bundle holds something that cannot be captured again.
        ModelFileInvalid: a pattern matches no parameter, the bundle lacks what a program needs, or `dynamic` asks for
            sizes that the bundle does not take.
        NotSupported: the bundle cannot be loaded here, or was changed in a way that no call can follow; or a program
            holds a dtype of its own, and `dtype` is given.
        OutputExists: something is at `output`.
        VerificationFailed: the new bundle disagrees with the forward graphs of `bundle`; nothing is left behind.
    """
    return derive_as(bundle, options)


def derive_as(
    bundle: BundleModule | str | os.PathLike[str], options: DeriveOptions, fresh: FreshProcess | None = None
) -> ExportReport:
    """Derive as `derive` does; `fresh` is the process that verifies the bundle, if it has been started."""
    check_type("bundle", bundle, (BundleModule, str, os.PathLike), "a loaded bundle, or the path of one")
    module = _changed(bundle if isinstance(bundle, BundleModule) else load(bundle), options)
    with forward_graphs_run(module), _frozen(module, options.freeze):
        source = source_of(module)
        if options.quantize is not None:
            quantize(module, options.quantize)
        step, before = options.step, step_program(module.bundle.manifest)
        own = [program for program in source.programs or () if program.name != before]  # type: ignore[union-attr]
        source = replace(source, programs=tuple(own))
        if step is None and (options.programs is None or STEP in options.programs):
            step = step_in(module.bundle.manifest)
        if options.dtype is not None:
            source = cast(source, options.dtype)
        source = narrowed(source, options.dynamic)
        wanted = [name for name in options.programs or () if step is None or name != STEP]
        export = ExportOptions(
            **{
                each.name: getattr(options, each.name)
                for each in dataclasses.fields(WriteOptions)
                if each.name != "step"
            },
            step=step,
            label_free=False,
            programs=source.programs if options.programs is None else programs_named(source, wanted),
            keep_operators=source.keep_operators,
            autocast=next(iter(variants_under_autocast(module.bundle).values()), None),
        )
        return export_as(source.target, source.example.args, dict(source.example.kwargs), export, fresh)


def _changed(module: BundleModule, options: DeriveOptions) -> BundleModule:
    """Return the module with its adapter, in its dtype and with its tokens; the caller's module is left as it is."""
    if options.lora is not None and options.merge:
        module = _merged(module, options.lora)
    if options.dtype is not None:
        module = in_dtype(module, options.dtype)
    if options.quantize is not None or options.resize_embeddings is not None:
        module = module.twin()
    if options.resize_embeddings is not None:
        if not isinstance(module, LanguageModel):
            raise ModelFileInvalid("resize_embeddings: the bundle is of no language model that `--recipe` exported")
        module.resize_token_embeddings(options.resize_embeddings)
    if options.lora is not None and not options.merge:
        module = _adapted(module, options.lora)
    return module


def _adapted(module: BundleModule, lora: str | os.PathLike[str]) -> BundleModule:
    """Return a copy with an adapter, whose factors train."""
    copy = module.twin()
    load_adapter(copy, lora, trainable=True)
    return copy


def _merged(module: BundleModule, lora: str | os.PathLike[str]) -> BundleModule:
    """Return a copy with an adapter in its weights."""
    copy, adapted = module.twin(), _adapted(module, lora)
    merge_adapter(adapted)
    with torch.no_grad():
        for name, tensor in adapted.state_tensors().items():
            copy.state_tensors()[name].copy_(tensor)
    return copy


@contextlib.contextmanager
def _frozen(module: BundleModule, patterns: Iterable[str]) -> Iterator[None]:
    """Freeze the parameters whose names match a pattern in the block."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    chosen = [parameter for pattern in patterns for parameter in _matching(parameters, pattern)]
    before = [(parameter, parameter.requires_grad) for parameter in chosen]
    try:
        for parameter in chosen:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, requires_grad in before:
            parameter.requires_grad_(requires_grad)


def _matching(parameters: dict[str, torch.nn.Parameter], pattern: str) -> list[Any]:
    found = [parameter for name, parameter in parameters.items() if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, parameters, n=3, cutoff=0) or list(parameters)[:3]
        listed = ", ".join(f"`{name}`" for name in near) or "none"
        raise ModelFileInvalid(f"freeze: `{pattern}` matches no parameter of the bundle; the nearest are {listed}")
    return found


@contextlib.contextmanager
def forward_graphs_run(module: BundleModule) -> Generator[None, None, None]:
    """Let calls in the block run forward graphs under autograd, to the bit as eager runs the model.

    Args:
        module: a loaded bundle; afterwards it runs as it did before.
    """
    before = {name: module.__dict__[name] for name in ("_request", "_targets", "_environment")}
    environment = dataclasses.replace(before["_environment"], matmul="torch")
    # Bypasses `__setattr__`, which handles the user's names.
    module.__dict__ |= {"_request": Request(target=AUTOGRAD), "_targets": NO_TARGETS, "_environment": environment}
    module.changed()
    try:
        yield
    finally:
        module.__dict__ |= before
        module.changed()
