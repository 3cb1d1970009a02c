"""`convert`: a file of `torch.export` of a bundle's forward graph, for what takes such files."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aotexport.errors import AttemptFailed, ExportFailed, ModelFileInvalid, VerificationFailed
from aotexport.model.bundle_source import source_of, without_defaults
from aotexport.model.programs import Example, Program
from aotexport.model.refusals import attempt
from aotexport.pipeline.derive import forward_graphs_run
from aotexport.torch_internals.calls import tree_leaves
from aotexport_runtime.call.flat_call import arguments_of
from aotexport_runtime.errors import NotWritten, OutputExists
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.loading import load
from aotexport_runtime.module.recorded import read_vector
from aotexport_runtime.rewrite.names import CHECK
from aotexport_runtime.values.observe import make_inputs


def convert(
    bundle: BundleModule | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    program: str | None = None,
    force: bool = False,
) -> torch.export.ExportedProgram:
    """Write the forward graph of a program as `torch.export.save` does; such a file loads with torch alone.

    Names of parameters and buffers, dynamic sizes and changes of state are the bundle's. Results of classes that torch
    does not know are dicts and tuples in it. The written file is compared, to the bit, with the bundle in its recorded
    calls.

    Args:
        bundle: a loaded bundle, trained or changed since or not; or the directory of one. Left as it is.
        output: file to write, `.pt2`.
        program: name of the program; None: `infer`, or the first of `forward`. A file has one mode.
        force: replace a file at `output`.

    Returns:
        What the file holds.

    Raises:
        BundleInvalid: there is no bundle, or it is broken.
        ExportFailed: torch cannot export the program.
        ModelFileInvalid: there is no such program of `forward`, or `output` does not end with `.pt2`.
        NotWritten: the file system refuses the file.
        OutputExists: something is at `output`.
        VerificationFailed: the file gives other results than the bundle; nothing is left behind.
    """
    place = Path(output)
    if place.suffix != ".pt2":
        raise ModelFileInvalid(f"`{place}` does not end with `.pt2`, by which readers know such a file")
    if place.is_dir() or (place.exists() and not force):
        raise OutputExists(f"`{place}` exists; choose another place, or replace a file by `--force`")
    module = bundle.twin() if isinstance(bundle, BundleModule) else load(bundle)
    with forward_graphs_run(module):
        chosen = _chosen(module, program)
        module.train(chosen.mode == "train")
        with _written(place) as file:
            with _refused_by_torch(chosen.name):
                exported = _exported(module, chosen)
                torch.export.save(exported, file)
            _compare(file, module, chosen)
    return exported


def _chosen(module: BundleModule, name: str | None) -> Program:
    programs = [each for each in source_of(module).programs or () if isinstance(each, Program)]
    found = {each.name: each for each in programs if each.method == "forward"}
    if name is None:
        name = "infer" if "infer" in found else next(iter(found), "forward")
    if name not in found:
        raise ModelFileInvalid(f"no program `{name}` of `forward`; there are {', '.join(found) or 'none'}")
    graph = module.bundle.graph(name, module.bundle.program(name).forward.file)
    if any(node.op == CHECK for node in graph.nodes):
        raise ExportFailed(
            f"program `{name}` checks values of its calls, since the model's code branches on them: a `.pt2` file "
            "would answer calls that the bundle refuses. Use `torch.cond` or `torch.where` in the model"
        )
    return found[name]


def _exported(module: BundleModule, program: Program) -> torch.export.ExportedProgram:
    example = program.example
    assert isinstance(example, Example)
    kwargs = dict(example.kwargs)
    bound = inspect.signature(module.forward).bind(*example.args, **kwargs)
    sizes = {name: (example.dynamic_shapes or {}).get(name) for name in bound.arguments}
    target = _with_plain_results(module)
    return torch.export.export(target, tuple(example.args), kwargs, dynamic_shapes=sizes, strict=False)


@contextlib.contextmanager
def _refused_by_torch(program: str) -> Iterator[None]:
    try:
        with attempt(f"torch.export of program `{program}`"):
            yield
    except AttemptFailed as failure:
        reason = str(failure.error).partition("\n\n")[0]
        raise ExportFailed(f"`torch.export` does not take program `{program}`: {reason}") from failure


def _with_plain_results(whole: BundleModule) -> nn.Module:
    """Return a module with the state of a loaded bundle, under its names, whose results are plain containers."""
    module = nn.Module()
    # The same dicts: what torch puts in the place of parameters is there for the calls.
    module.__dict__ |= {name: whole.__dict__[name] for name in ("_parameters", "_buffers", "_modules")}
    module.training = whole.training

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _plain(whole(*args, **kwargs))

    forward.__dict__["__signature__"] = inspect.signature(whole.forward)
    module.forward = forward
    return module


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    return value


def _compare(file: str, module: BundleModule, program: Program) -> None:
    """Compare a file with the bundle, in its recorded calls; each begins with the bundle's state."""
    bundle, record = module.bundle, module.bundle.program(program.name)
    for entry in (each for each in bundle.manifest.testvectors if each.program == program.name):
        vector, stored = read_vector(bundle, entry)
        twin = module.twin().train(module.training)
        results: list[list[Any]] = []
        for called in (_with_plain_results(twin), torch.export.load(file).module()):
            values = make_inputs(vector.inputs, stored, module.device, module.form).values
            args, kwargs = without_defaults(record, *arguments_of(record)(values, module.state_tensors()))
            with torch.random.fork_rng(), torch.set_grad_enabled(program.grad):
                torch.manual_seed(0)
                result = called(*args, **kwargs)
            results.append(tree_leaves((result, dict(called.named_buffers()), args, kwargs)))
        if len(results[0]) != len(results[1]) or not all(map(_same, *results)):
            raise VerificationFailed(f"the file differs from the bundle in the recorded call `{entry.name}`", [])


def _same(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, torch.Tensor):
        return ours == theirs
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


@contextlib.contextmanager
def _written(place: Path) -> Iterator[str]:
    """Yield the name of a file beside `place`, which takes its place if the block succeeds."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
            file = os.path.join(scratch, place.name)
            yield file
            os.replace(file, place)
    except OSError as error:
        raise NotWritten(f"`{place}` cannot be written: {error.strerror}", error.errno or 0) from error
