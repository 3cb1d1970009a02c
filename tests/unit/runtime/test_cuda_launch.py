"""Choice of code, packing of parameters, grids, and the calls that a launch makes; all without a GPU."""

import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from aotexport_runtime import NotSupported
from aotexport_runtime.engines.cuda.choice import architectures_for
from aotexport_runtime.engines.cuda.launch import Driver, Launcher, grid_of, pack_number
from aotexport_runtime.schema.targets import Kernel, KernelBinary, KernelCandidate, NumberParameter, PointerParameter
from tests.refusals import refusal

ALL = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "ptx")


@pytest.mark.parametrize(
    ("capability", "available", "expected"),
    [
        ((8, 0), ALL, ["sm_80", "ptx"]),
        ((8, 7), ALL, ["sm_86", "sm_80", "ptx"]),
        ((8, 9), ("sm_80",), ["sm_80"]),
        ((10, 3), ALL, ["ptx"]),
        ((12, 0), ALL, ["sm_120", "ptx"]),
        ((12, 1), ("sm_120",), []),
        ((7, 5), ALL, []),
    ],
)
def test_code_for_a_device_is_exact_then_same_major_then_text(capability, available, expected):
    assert architectures_for(available, capability) == expected


def kernel(*parameters, name="k", candidates=None, grid=("n", 1, 1), grid_arguments=()):
    candidates = candidates or (KernelCandidate(num_warps=4, num_stages=1, grid=grid),)
    return Kernel(name=name, parameters=parameters, grid_arguments=grid_arguments, candidates=candidates)


def binary(architecture, shared_nbytes=0):
    return KernelBinary(architecture=architecture, offset=0, nbytes=1, sha256="0" * 64, shared_nbytes=shared_nbytes)


@pytest.mark.parametrize(
    ("type_", "value", "data"),
    [
        ("i1", True, b"\x01"),
        ("i32", -1, b"\xff\xff\xff\xff"),
        ("i64", -(1 << 63), struct.pack("<q", -(1 << 63))),
        ("u64", (1 << 64) - 1, b"\xff" * 8),
        ("fp16", 1.5, struct.pack("<e", 1.5)),
        ("bf16", -1.5, b"\xc0\xbf"),
        ("fp32", 0.1, struct.pack("<f", 0.1)),
        ("fp32", float("-inf"), struct.pack("<f", float("-inf"))),
    ],
)
def test_number_is_packed_in_the_width_of_its_type(type_, value, data):
    assert pack_number(type_, value).to_bytes(8, "little") == data.ljust(8, b"\0")


@pytest.mark.parametrize(("type_", "value"), [("i32", 1 << 31), ("i32", -(1 << 31) - 1), ("u8", -1), ("i1", 2)])
def test_number_that_its_type_cannot_hold_is_refused(type_, value):
    assert refusal(NotSupported, pack_number, type_, value) == f"{value} does not fit a parameter of type {type_}"


@pytest.mark.parametrize(("axis", "most"), [(0, 2147483647), (1, 65535), (2, 65535)])
def test_grid_beyond_the_device_is_refused(axis, most):
    record = kernel(grid=tuple("n" if each == axis else 1 for each in range(3)))
    taken = grid_of(record, record.candidates[0], {"n": most})
    assert taken == tuple(most if each == axis else 1 for each in range(3))
    with pytest.raises(NotSupported) as caught:
        grid_of(record, record.candidates[0], {"n": most + 1})
    blocks = " x ".join(str(most + 1 if each == axis else 1) for each in range(3))
    assert str(caught.value) == f"kernel `k` would need {blocks} blocks, more than a device takes"


class RecordingLibrary:
    """Answers like the driver library, and writes down what it is asked."""

    context = 0x30

    def __init__(self, failing=""):
        self.calls = []
        self.failing = failing

    def __getattr__(self, name):
        def call(*args):
            if name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_OF_TEST"
                return 0
            self.calls.append((name, self.seen(name, args)))
            for arg in args:
                if hasattr(arg, "_obj") and isinstance(arg._obj, ctypes.c_void_p):
                    arg._obj.value = {"cuModuleLoadData": 0x10, "cuModuleGetFunction": 0x20}.get(name, self.context)
            return 700 if name == self.failing else 0

        return call

    @staticmethod
    def seen(name, args):
        if name.endswith("Kernel"):
            count = next(arg for arg in args if isinstance(arg, ctypes.Array))
            values = [ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64)).contents.value for pointer in count]
            return [arg for arg in args if isinstance(arg, int)], values
        return [getattr(arg, "value", arg) for arg in args if not hasattr(arg, "_obj")]


PARAMETERS = (
    PointerParameter(name="x", dtype="float32", alignment=16),
    NumberParameter(name="n", type="i32"),
    NumberParameter(name="scale", type="fp64"),
)


def launcher(library, *, shared_nbytes=0, cooperative=False, scratch=0):
    chosen = KernelCandidate(num_warps=2, num_stages=1, grid=("n", 1, 1), cooperative=cooperative)
    code = KernelBinary(
        architecture="sm_80",
        offset=0,
        nbytes=1,
        sha256="0" * 64,
        shared_nbytes=shared_nbytes,
        global_scratch_nbytes=scratch,
        global_scratch_alignment=128,
    )
    record = kernel(*PARAMETERS, candidates=(chosen,))
    driver = Driver(library, lambda _: b"code")
    driver.thread.stream = 0x99
    return Launcher(record, chosen, code, driver, torch.device("cpu", 0))


@pytest.fixture
def tensor():
    return torch.ones(8)


def test_launches_of_many_threads_pass_their_own_parameters(tensor):
    library = RecordingLibrary()
    launch = launcher(library)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: launch(x=tensor, n=n, scale=float(n)), range(1, 200)))
    launches = [seen for name, seen in library.calls if name == "cuLaunchKernel"]
    assert sorted(numbers[1] for numbers, _ in launches) == list(range(1, 200))
    for numbers, values in launches:
        assert values == [tensor.data_ptr(), numbers[1], pack_number("fp64", float(numbers[1])), 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), "needs a tensor of float32 on cpu:0"),
        (lambda x: None, "needs a tensor of float32 on cpu:0"),
        (lambda x: x[1:], "needs an address aligned to 16"),
    ],
)
def test_tensor_that_the_code_does_not_bear_is_refused(tensor, change, message):
    said = refusal(NotSupported, launcher(RecordingLibrary()), x=change(tensor), n=1, scale=0.0)
    assert said == f"kernel parameter `x` {message}"
