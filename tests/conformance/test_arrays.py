"""NumPy arrays: which calls a bundle refuses, and which models an export."""

import re

import numpy as np
import pytest
import torch

import aotexport
import aotexport_runtime
from aotexport_runtime import CallInvalid
from tests.refusals import refusal


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.fixture(scope="module")
def double(new_bundle):
    return aotexport_runtime.load(new_bundle(lambda x, t: (x * 2, t * 2), ramp(3), torch.ones(3)))


FIXED = '; its sizes are fixed as in the example, an export with --dynamic "x:0=NAME" lets this one vary'


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (torch.ones(3), torch.ones(3)),
            "`x`: expected an array, as at capture; a tensor float32[3] is no `numpy.ndarray`",
        ),
        (
            (ramp(3)[::-1], torch.ones(3)),
            "`x`: expected an array, as at capture; array([2., 1., 0.], dtype=float32) is an array of float32 with "
            "strides (-4,), which no tensor has; pass a copy",
        ),
        (
            (np.frombuffer(ramp(3).tobytes(), np.float32), torch.ones(3)),
            "`x`: expected an array, as at capture; array([0., 1., 2.], dtype=float32) is an array that is not "
            "writable, which tensors cannot be; pass a copy",
        ),
        ((ramp(3).astype(np.float64), torch.ones(3)), "`x`: expected dtype float32, got float64"),
        ((ramp(4), torch.ones(3)), f"`x`: expected shape [3], got [4] at axis 0{FIXED}"),
        ((ramp(3), ramp(3)), "`t`: expected a tensor float32, got ndarray"),
    ],
)
def test_call_with_other_arrays_is_refused(double, args, message):
    said = refusal(CallInvalid, double, *args)
    assert said.splitlines() == ["the call does not fit program `infer`:", f"  - {message}"]


def test_result_that_is_no_argument_is_an_array_of_its_own(double):
    x = ramp(3)
    first, second = double(x, torch.ones(3)), double(x, torch.ones(3))
    assert type(first[0]) is np.ndarray
    assert not np.shares_memory(first[0], x)
    assert not np.shares_memory(first[0], second[0])


def steps_back(x):
    return x[::-1]


def strides(x):
    return x.strides


def asarray(x):
    return np.asarray(x)


def constant(x):
    return np.arange(3)


REFUSED = [
    (
        steps_back,
        "the model uses a slice of an array with a negative step, which torch has no counterpart of. Flip the tensor "
        "(`torch.flip`)",
    ),
    (
        strides,
        "the model uses `ndarray.strides`, which torch has no counterpart of. Convert the array (`torch.from_numpy`), "
        "and compute with torch",
    ),
    (
        asarray,
        "the model uses an array where NumPy needs its own, which torch has no counterpart of. Convert the array "
        "(`torch.from_numpy`), and compute with torch",
    ),
    (
        constant,
        "output `output` is a `numpy.ndarray`, which a bundle cannot hold. Return a tensor (`torch.from_numpy`)",
    ),
]


@pytest.mark.parametrize(("function", "message"), REFUSED, ids=[function.__name__ for function, _ in REFUSED])
def test_model_that_does_with_arrays_what_torch_does_not_is_refused(tmp_path, function, message):
    said = refusal(aotexport.ExportFailed, aotexport.export, function, (ramp(3),), output=tmp_path / "bundle")
    assert re.sub(r"^\S+:\d+: in \w+: ", "", said) == message


def test_array_of_a_tensor_that_requires_grad_is_refused_as_in_eager(tmp_path):
    aotexport.export(lambda x: x.numpy(), (torch.ones(3),), output=tmp_path / "bundle", verify=False)
    with pytest.raises(RuntimeError, match="Can't call numpy\\(\\) on Tensor that requires grad"):
        aotexport_runtime.load(tmp_path / "bundle")(torch.ones(3, requires_grad=True))
