"""Mistakes in calls of the two packages, each with the class and the whole text of its error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport import ExportFailed, ModelFileInvalid, Program
from aotexport_runtime import ArgumentInvalid, BundleInvalid, CallInvalid, NotSupported

LINEAR = nn.Linear(4, 2)
X = torch.ones(3, 4)
BATCH = torch.export.Dim("batch")
EXAMPLE = (
    "an example call must be a tuple of positional arguments, a dict of keyword arguments, or an `aotexport.Example`, got "
    "Tensor"
)
MAKE = "To make a bundle of a model, export it (`aotexport.export`)"
WEIGHTS = (
    "the programs were captured with weights of float32, and do not hold for float16. Convert the model and its example "
    "inputs, and export again"
)


def export(model: Any = LINEAR, args: Any = (X,), *more: Any, **options: Any) -> Callable[[], Any]:
    """Return a call of `export` that is yet to be made."""
    return lambda: aotexport.export(model, args, *more, **{"output": "new", **options})


def load(**options: Any) -> Callable[[], Any]:
    return lambda: aotexport_runtime.load("bundle", **options)


def call(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: aotexport_runtime.load("bundle").eval()(*args, **kwargs)


def with_module(act: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: act(aotexport_runtime.load("bundle"))


def save(path: Any = "new", wrap: Callable[[Any], Any] = lambda module: module) -> Callable[[], Any]:
    return with_module(lambda module: aotexport_runtime.save(wrap(module), path))


def refused(*violations: str) -> str:
    return "\n".join(["the call does not fit program `infer`:", *(f"  - {violation}" for violation in violations)])


# (name, what the user does, class of the error, its whole text)
EXPORTS = [
    (
        "tensor_for_arguments",
        export(LINEAR, X),
        ModelFileInvalid,
        "example arguments must be a tuple, got Tensor; write `(x,)` for one",
    ),
    (
        "class_for_model",
        export(nn.Linear),
        ModelFileInvalid,
        "what to export must be a module or a function of tensors, got the class `Linear`: pass an instance",
    ),
    (
        "name_for_model",
        export("net"),
        ModelFileInvalid,
        "what to export must be a module or a function of tensors, got str",
    ),
    (
        "weights_for_model",
        export(LINEAR.state_dict()),
        ModelFileInvalid,
        "what to export must be a module or a function of tensors, got OrderedDict",
    ),
    (
        "list_for_kwargs",
        export(LINEAR, (), [X]),
        ArgumentInvalid,
        "`kwargs`: expected a dict of keyword arguments, got list",
    ),
    (
        "too_many_arguments",
        export(LINEAR, (X, X)),
        ModelFileInvalid,
        "the example inputs do not fit `Linear(input: torch.Tensor) -> torch.Tensor`: too many positional arguments",
    ),
    (
        "double_for_float",
        export(LINEAR, (X.double(),)),
        ExportFailed,
        "the model fails on the example inputs in train mode: RuntimeError: mat1 and mat2 must have the same dtype, but "
        "got Double and Float",
    ),
    ("output_is_none", export(output=None), ArgumentInvalid, "`output`: expected a path, got None"),
    ("targets_are_a_number", export(targets=3), ArgumentInvalid, "`targets`: expected names, got int"),
    ("programs_are_a_number", export(programs=3), ArgumentInvalid, "`programs`: expected names of programs, got int"),
    ("programs_are_empty", export(programs=[]), ModelFileInvalid, "no programs were asked for"),
    (
        "method_is_missing",
        export(programs=Program("encode", method="encode")),
        ModelFileInvalid,
        "`Linear` has no method `encode`",
    ),
    (
        "mode_is_unknown",
        export(programs=Program("test", mode="test")),
        ModelFileInvalid,
        "program `test`: no mode 'test'; there are train and eval",
    ),
    ("example_of_a_program", export(programs=Program("own", example=X)), ModelFileInvalid, EXAMPLE),
    ("variants_are_tensors", export(variants=[X]), ModelFileInvalid, EXAMPLE),
    (
        "dynamic_is_a_name",
        export(dynamic_shapes="batch"),
        ModelFileInvalid,
        "dynamic_shapes must be a dict or tuple, got str",
    ),
    (
        "dynamic_of_another_argument",
        export(dynamic_shapes={"x": {0: BATCH}}),
        ModelFileInvalid,
        "dynamic_shapes names `x`; the parameters are input",
    ),
    (
        "dynamic_axis_is_a_name",
        export(dynamic_shapes={"input": {"0": BATCH}}),
        ModelFileInvalid,
        "dynamic_shapes: `input` needs a dict from axis, a number, got '0'",
    ),
    (
        "dynamic_dimension_is_a_name",
        export(dynamic_shapes={"input": {0: "batch"}}),
        ModelFileInvalid,
        "dynamic_shapes: axis 0 of `input` needs a dimension, `torch.export.Dim(\"name\")`, got 'batch'",
    ),
    (
        "dynamic_dimension_is_another_size",
        export(dynamic_shapes={"input": {0: 9}}),
        ModelFileInvalid,
        "dynamic_shapes: axis 0 of `input` is fixed to 9; it is 3 in the example inputs",
    ),
    (
        "one_name_for_two_sizes",
        export(nn.Bilinear(4, 4, 2), (X, X[:2]), dynamic_shapes=({0: BATCH}, {0: BATCH})),
        ModelFileInvalid,
        "dynamic_shapes: axis 0 of `input1` is 3 in the example inputs, so with the dimension `batch` axis 0 of `input2` "
        "must be 3; it is 2",
    ),
    ("onnx_is_a_word", export(onnx="yes"), ArgumentInvalid, "`onnx`: expected True, False or `OnnxOptions`, got str"),
    (
        "size_is_a_word",
        export(shard_nbytes="5GB"),
        ArgumentInvalid,
        "`shard_nbytes`: expected a number of bytes, got str",
    ),
]

LOADS = [
    ("nothing_there", lambda: aotexport_runtime.load("nothing"), BundleInvalid, "no directory `nothing`"),
    (
        "file",
        lambda: aotexport_runtime.load("weights.pt"),
        BundleInvalid,
        "`weights.pt` is a file, and a bundle is a directory",
    ),
    (
        "folder",
        lambda: aotexport_runtime.load("data"),
        BundleInvalid,
        "`data` is no bundle: it has no file `bundle.json`",
    ),
    ("number", lambda: aotexport_runtime.load(3), ArgumentInvalid, "`path`: expected a path, got int"),
    (
        "target_is_unknown",
        load(target="gpu"),
        NotSupported,
        "no target `gpu`; there are auto, cpu, portable, autograd, cuda, onnx",
    ),
    ("target_is_a_number", load(target=3), ArgumentInvalid, "`target`: expected the name of a target, got int"),
    (
        "target_has_no_kernels",
        load(target="cuda"),
        NotSupported,
        "the bundle has no kernels. Export it with `--target cuda`",
    ),
    (
        "target_has_no_models",
        load(target="onnx"),
        NotSupported,
        "the bundle has no ONNX models; add them with `aotexport onnx`, or load another target",
    ),
    ("trust_is_true", load(trust=True), NotSupported, "no trust tier `True`; there are data and native"),
    (
        "budget_is_a_percentage",
        load(memory_budget=50),
        NotSupported,
        "no memory budget 50; it is a part of what is saved otherwise, from 0 to 1",
    ),
    (
        "budget_is_a_word",
        load(memory_budget="half"),
        ArgumentInvalid,
        "`memory_budget`: expected a number from 0 to 1, got str",
    ),
    ("products_are_unknown", load(products="mkl"), NotSupported, "no `mkl` products; there are fastest, onednn, torch"),
    ("device_is_a_fraction", load(device=0.5), ArgumentInvalid, "`device`: expected the name of a device, got float"),
    (
        "namespaces_are_a_number",
        load(operator_namespaces=3),
        ArgumentInvalid,
        "`operator_namespaces`: expected names, got int",
    ),
    (
        "class_for_classes",
        load(tensor_types=nn.Linear),
        ArgumentInvalid,
        "`tensor_types`: expected a list of classes, got type",
    ),
    (
        "program_is_unknown",
        with_module(lambda module: module.program("eval")),
        BundleInvalid,
        "no program 'eval'; the bundle has train, infer",
    ),
]

CALLS = [
    ("nothing", call(), CallInvalid, refused("`input`: missing; it was passed at capture")),
    ("too_much", call(X, X), CallInvalid, refused("takes 1 positional arguments, got 2")),
    (
        "other_name",
        call(x=X),
        CallInvalid,
        refused("`x`: unexpected keyword argument", "`input`: missing; it was passed at capture"),
    ),
    ("list", call([X]), CallInvalid, refused("`input`: expected a tensor float32, got list")),
    ("array", call(X.numpy()), CallInvalid, refused("`input`: expected a tensor float32, got ndarray")),
    ("other_dtype", call(X.long()), CallInvalid, refused("`input`: expected dtype float32, got int64")),
    ("other_rank", call(X[0]), CallInvalid, refused("`input`: expected shape [batch, 4], got [4]")),
    ("other_width", call(X[:, :3]), CallInvalid, refused("`input`: expected shape [batch, 4], got [3, 3] at axis 1")),
    ("too_many_rows", call(torch.ones(9, 4)), CallInvalid, refused("`input`: size 0: `batch` is 9, outside [1:8]")),
    ("other_device", call(X.to("meta")), CallInvalid, refused("`input`: expected a tensor on cpu, got one on meta")),
    ("half", with_module(lambda module: module.half()), NotSupported, WEIGHTS),
    (
        "pickle",
        with_module(lambda module: torch.save(module, "module.pt")),
        NotSupported,
        "a loaded bundle is not pickled: save it with `aotexport_runtime.save(module, path)`, or its weights alone with "
        "`module.state_dict()`",
    ),
]

SAVES = [
    (
        "no_bundle",
        lambda: aotexport_runtime.save(LINEAR, "new"),
        ArgumentInvalid,
        f"`module`: expected a loaded bundle, got Linear. {MAKE}",
    ),
    (
        "weights",
        save(wrap=lambda module: module.state_dict()),
        ArgumentInvalid,
        f"`module`: expected a loaded bundle, got OrderedDict. {MAKE}",
    ),
    (
        "wrapper",
        save(wrap=lambda module: nn.Sequential(module, nn.Linear(2, 3))),
        ArgumentInvalid,
        "`module`: expected a loaded bundle, got Sequential. It holds one as `0`: save that one, or export the whole "
        "(`aotexport.export`)",
    ),
    (
        "arguments_swapped",
        with_module(lambda module: aotexport_runtime.save("new", module)),
        ArgumentInvalid,
        f"`module`: expected a loaded bundle, got str. {MAKE}",
    ),
    ("path_is_a_number", save(3), ArgumentInvalid, "`path`: expected a path, got int"),
    (
        "over_itself",
        save("bundle"),
        NotSupported,
        "`bundle` exists; give force=True (--force) to replace it, or choose another place",
    ),
    ("over_a_folder", save("data"), NotSupported, "`data` exists and is no bundle; choose another place"),
    (
        "below_a_file",
        save("weights.pt/new"),
        NotSupported,
        "`weights.pt/new` would be below `{here}/weights.pt`, which is no directory; choose another place",
    ),
]

ROWS = [
    (f"{table}_{name}", *row)
    for table, rows in (("export", EXPORTS), ("load", LOADS), ("call", CALLS), ("save", SAVES))
    for name, *row in rows
]


@pytest.mark.parametrize(("act", "kind", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_mistake_in_python_is_told_in_whole(
    act: Callable[[], Any], kind: type[Exception], text: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = sorted(path.name for path in here.iterdir())
    with pytest.raises(kind) as caught:
        act()
    assert (type(caught.value), str(caught.value)) == (kind, text.replace("{here}", str(here)))
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in here.iterdir() if path.name != "module.pt") == files


def test_one_name_is_taken_for_a_list_of_names(here: Path) -> None:
    aotexport.export(LINEAR, (X,), output="new", targets="portable", programs="infer", verify=False)
    assert aotexport_runtime.load("new", operator_namespaces="mine").bundle.program_names == ("infer",)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the message is that of a torch without CUDA")
def test_missing_gpu_is_named(here: Path) -> None:
    with pytest.raises(NotSupported) as caught:
        aotexport_runtime.load("bundle", device="cuda")
    assert str(caught.value) == "no device `cuda` here: Torch not compiled with CUDA enabled"


def test_report_of_an_export_reads_as_some_lines(here: Path) -> None:
    report = aotexport.export(LINEAR, (X,), output="new")
    lines = re.sub(r"[\d,.]+ s$", "1.0 s", re.sub(r"[\d,]+ bytes", "9 bytes", str(report))).splitlines()
    assert lines == [
        "new: Linear (module), 2 parameters (10 elements), 9 bytes in 16 files",
        "  train (train mode): portable; operators: 1 forward, 8 joint",
        "  infer (eval mode): portable; operators: 1 forward, 2 inference",
        "  24 values compared with eager: the largest relative error is 0.0e+00",
        "  1.0 s",
    ]
